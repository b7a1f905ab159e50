import sys

from gradient_doctor.command import main

if __name__ == "__main__":
    sys.exit(main())
