"""Small scripts with one marked line, examined as a user's script would be."""

import textwrap
from dataclasses import dataclass

from doctor.harness import examine_script, serious

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Independent, Normal, TransformedDistribution, TanhTransform
torch.manual_seed(0)
"""


@dataclass
class Look:
    findings: list
    error: BaseException | None
    line: int | None  # the line marked with HERE
    path: str

    def of(self, number):
        return [f for f in self.findings if f.number == number]

    def one(self, number):
        """The only serious finding, of this class and at the marked line."""
        found = serious(self.findings)
        assert [f.number for f in found] == [number], "\n".join(map(str, self.findings))
        (finding,) = found
        where = (finding.site.file, finding.site.line) if finding.site else None
        assert self.line is None or where == (self.path, self.line), str(finding)
        return finding

    def clean(self):
        assert self.error is None, self.error
        found = serious(self.findings)
        assert not found, "\n".join(map(str, found))


def names(finding):
    return {name.split(".", 1)[1] for name in finding.parameters}


def look(tmp_path, body, **options):
    source = HEAD + textwrap.dedent(body)
    lines = [k for k, line in enumerate(source.splitlines(), 1) if "# HERE" in line]
    path = tmp_path / "script.py"
    path.write_text(source)
    examination = examine_script(path, **options)
    return Look(examination.findings, examination.error, lines[0] if lines else None, str(path))
