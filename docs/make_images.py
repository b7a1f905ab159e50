"""The pictures of the report in docs/images, taken of what `make demo` wrote.

    python docs/make_images.py [--demo build/demo]

Needs chromium and playwright, as the browser tests do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from entropy_experiments.report.html.page import write_report

IMAGES = Path(__file__).parent / "images"
LOOKS = {  # name: (width, height, scheme, pixels per point, scrolled to)
    "light": (1100, 2190, "light", 1.0, None),
    "dark": (1100, 1180, "dark", 1.0, "#texts"),
    "narrow": (390, 1500, "light", 1.5, None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--demo", type=Path, default=Path("build/demo"))
    demo = parser.parse_args().demo
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("No chromium here: apt-get install chromium.")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        page_file = write_report(
            demo / "influence", Path(folder) / "report.html", trajectory=demo / "trajectory.json"
        )
        sandbox = [] if os.geteuid() else ["--no-sandbox"]
        browser = driver.chromium.launch(executable_path=chromium, args=sandbox)
        for name, (width, height, scheme, scale, place) in LOOKS.items():
            page = browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme="dark" if scheme == "dark" else "light",
                device_scale_factor=scale,
            )
            page.goto(page_file.as_uri())
            page.wait_for_selector(".rollout")
            if place is not None:
                page.evaluate(f"document.querySelector('{place}').scrollIntoView()")
                page.wait_for_timeout(300)
            page.screenshot(path=IMAGES / f"report_{name}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
