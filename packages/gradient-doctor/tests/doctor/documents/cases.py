"""What a report on each document's script must say."""

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class DocumentCase:
    document: str
    number: int
    file: str
    parameters: tuple[str, ...] = ()
    affected: tuple[str, ...] = ()
    raises: type[BaseException] | None = None
    also: tuple[int, ...] = ()
    count: int | None = None  # how many parameters the finding must name

    @property
    def id(self) -> str:
        return f"{self.document}-{self.number:02d}-{Path(self.file).stem}"

    @property
    def path(self) -> Path:
        return HERE / self.file


DOCUMENTS = (
    DocumentCase("000", 1, "empty_responses.py", affected=("*",), raises=RuntimeError),
    DocumentCase("001", 10, "all_none.py", ("*lora_A*", "*lora_B*"), count=392),
    DocumentCase("001", 19, "lengths_372_200.py", affected=("*",), raises=RuntimeError),
    DocumentCase(
        "003", 2, "no_grad_apply.py", ("numeric.weight", "out.bias"), ("numeric.*", "out.*")
    ),
    DocumentCase(
        "003", 15, "fp16_unscale.py", ("lm.0.weight", "lm.2.bias"), ("lm.*",), raises=ValueError
    ),
    DocumentCase(
        "003", 12, "second_backward.py", ("pi_mean.weight",),
        ("pi_mean.*", "trunk.*", "qwen.*", "weight", "bias"), raises=RuntimeError,
    ),
    DocumentCase(
        "003", 3, "detached_info.py", ("pi_mean.weight", "trunk.weight"), ("pi_mean.*", "trunk.*")
    ),
    DocumentCase("003", 6, "throwaway_projection.py"),
    DocumentCase("003", 18, "float_ids.py", affected=("*",), raises=RuntimeError),
)  # fmt: skip
