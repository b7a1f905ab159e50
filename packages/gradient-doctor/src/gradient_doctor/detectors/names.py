"""What a program's names promise: a target network of its own (30), a backward of its own (32).

`self.target_net = model` gives the online network a second name, not a copy: targets move with
every step, and copying the weights over copies them onto themselves.

`backward` is a method that autograd calls of a `torch.autograd.Function`. In an `nn.Module` it is a
method like any other, and nobody calls it: gradients pass unchanged.
"""

from __future__ import annotations

import ast
import gc
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from gradient_doctor.detectors.places import birth_site
from gradient_doctor.findings import Severity, Site
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, OpCall, Session, StepRecord
from gradient_doctor.sites import is_user_file
from gradient_doctor.slips import assigned_name

# networks that are kept apart from the one that learns
_APART = re.compile(
    r"^_?(target|tgt|old|ema|teacher|reference|ref|frozen|momentum|lagged)"
    r"(_?(net|network|model|q|q_net|q_network|critic|actor|policy|value|encoder))?\d?$"
    r"|^_?(net|network|model|q|q_net|qnet|critic|actor|policy|value|encoder)"
    r"_?(target|tgt|old|ema|teacher|reference|ref|bar)\d?$"
)


_TEACHER = re.compile(r"^_?teacher(_?(net|network|model))?$")
_PUPIL = re.compile(r"^_?student(_?(net|network|model))?$")
_ENOUGH = 2  # steps
_MODULES = 64  # whose names are looked for


class Names(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._looked: set[Site | None] = set()
        self._searched = False
        self._itself: dict[Site, list[Any]] = {}  # parameters that are written into themselves
        self._taught: dict[str, set[int]] = {}  # steps by the teacher's name

    def backward_starts(self, backward: Backward) -> None:
        """Once: the names that the networks have."""
        site, session = backward.site, self.session
        if self._searched or site is None or not session.record.traced:
            return
        self._searched = True
        roots = list(session.registry.roots.values())
        parts = [m for root in roots for m in root.modules() if any(True for _ in m.children())]
        big = [*roots, *parts][:_MODULES]
        for names in _scopes(big) if big else ():
            self._doubles(site.file, names)

    def _doubles(self, file: str, names: Mapping[str, Any]) -> None:
        registry = self.session.registry
        by_id: dict[int, list[str]] = {}
        for name, value in names.items():
            if isinstance(value, nn.Module):
                by_id.setdefault(id(value), []).append(name)
        for known in by_id.values():
            apart = [name for name in known if _APART.search(name)]
            others = [name for name in known if name not in apart and not name.startswith("__")]
            if not apart or not others:
                continue
            module = names[apart[0]]
            theirs = registry.bits(module.parameters()) & registry.owned
            if theirs:
                self._say_double(file, apart[0], others[0], theirs)

    def _say_double(self, file: str, apart: str, other: str, bits: int) -> None:
        self.report(
            30,
            Severity.WARNING,
            f"`{apart}` and `{other}` are one network, which an optimizer trains.",
            why="The assignment gave it a second name, not a copy. What is computed with "
            f"`{apart}` moves with every step of `{other}`, and copying weights from one to the "
            "other changes nothing.",
            fix=f"{apart} = copy.deepcopy({other})",
            site=assigned_name(file, apart),
            parameters=bits,
        )

    # an average of a network with itself

    def op(self, call: OpCall) -> None:
        if call.short not in ("lerp_", "copy_") or len(call.inputs) < 2:
            return
        target, source = call.inputs[0], call.inputs[1]
        if target is source and isinstance(target, nn.Parameter) and call.site is not None:
            self._itself.setdefault(call.site, []).append(target)

    def _say_itself(self, at: Site, parameters: list[Any]) -> None:
        registry = self.session.registry
        bits = registry.bits(parameters)
        frozen = [registry.frozen_at.get(p) for p in parameters if not p.requires_grad]
        off = next((place for place in frozen if place is not None), None)
        self.report(
            4 if off is not None else 30,
            Severity.WARNING,
            "A network is averaged with itself"
            + ("; to freeze the average has frozen the network." if off is not None else "."),
            why=f"At {at} parameters are moved towards the very same parameters: the average is "
            "another name of the network, not a copy of it"
            + (f", and requires_grad_(False) at {off} was meant for the copy." if off else "."),
            fix="Make the average with copy.deepcopy(model).",
            site=off or at,
            parameters=bits,
            related=(at,),
        )

    # a teacher that learns from its pupil

    def backward_ended(self, backward: Backward) -> None:
        registry = self.session.registry
        moved = backward.received & registry.owned
        if backward.kind != "backward" or not moved:
            return
        networks = dict(registry.roots)
        for root in registry.roots.values():
            networks.update(root.named_children())
        reached = {
            name: registry.bits(network.parameters()) & moved for name, network in networks.items()
        }
        teachers = {name: bits for name, bits in reached.items() if bits and _TEACHER.search(name)}
        pupils = {name for name, bits in reached.items() if bits and _PUPIL.search(name)}
        for name, bits in teachers.items() if pupils else ():
            steps = self._taught.setdefault(name, set())
            steps.add(backward.step)
            if len(steps) == _ENOUGH:
                self._say_taught(name, min(pupils), bits, backward.site)

    def _say_taught(self, teacher: str, pupil: str, bits: int, site: Site | None) -> None:
        registry = self.session.registry
        owners = [
            name
            for name, optimizer in registry.optimizers.items()
            if registry.bits(owned_by(optimizer)) & bits
        ]
        # the latest: an earlier one has trained the teacher on its own
        made = [birth_site(registry, registry.optimizers[name]) for name in reversed(owners)]
        self.report(
            30,
            Severity.WARNING,
            f"The loss of `{pupil}` also trains `{teacher}`.",
            why=f"One backward gives gradients to both, and {' and '.join(sorted(owners))} steps "
            f"on those of `{teacher}`: it moves towards what `{pupil}` says, where it should stay "
            "what it is.",
            fix=f"Compute {teacher}'s output under no_grad, and keep it out of the optimizer.",
            site=next((place for place in made if place is not None), site),
            parameters=bits,
            related=(site,),
        )

    def step_ended(self, record: StepRecord) -> None:
        if record.traced and self.session.age + 1 >= self.session.trace_steps:
            self._judge()

    def finish(self, error: BaseException | None) -> None:
        self._judge()

    def _judge(self) -> None:
        for at, parameters in self._itself.items():
            self._say_itself(at, list({id(p): p for p in parameters}.values()))
        self._itself.clear()
        self._judge_kinds()

    def _judge_kinds(self) -> None:
        """Modules that ran in a forward and bring a `backward` along."""
        for kind in self.session.kinds:
            method = kind.__dict__.get("backward")
            code = getattr(method, "__code__", None)
            if code is None or not is_user_file(code.co_filename) or not _is_derivative(method):
                continue
            site = Site(code.co_filename, code.co_firstlineno, code.co_name)
            if site in self._looked:
                continue
            self._looked.add(site)
            self.report(
                32,
                Severity.WARNING,
                f"{kind.__name__}.backward is never called: the gradient is that of its forward.",
                why="Autograd calls `backward` of a torch.autograd.Function. A module has no such "
                "method of its own; this one is code that nobody runs, and gradients pass as if "
                "it were not there.",
                fix="Derive from torch.autograd.Function (static forward and backward with ctx), "
                f"and call {kind.__name__}.apply(x).",
                site=site,
            )


def _is_derivative(method: Any) -> bool:
    """Whether it takes a gradient and gives one; trainers have methods that go back."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError):
        return False
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef):
        return False
    names = [argument.arg for argument in function.args.args]
    takes = any("grad" in name or name == "ctx" for name in names)
    gives = any(isinstance(n, ast.Return) and n.value is not None for n in ast.walk(function))
    calls = any(
        isinstance(n, ast.Attribute) and n.attr in ("backward", "step") for n in ast.walk(function)
    )
    return takes and gives and not calls


def _scopes(modules: list[nn.Module]) -> Iterator[Mapping[str, Any]]:
    """Attributes and global variables that hold one of these modules.

    Local variables are left alone: to look at them would keep their tensors alive.
    """
    seen: set[int] = set()
    for owner in gc.get_referrers(*modules):
        attributes = owner if isinstance(owner, dict) else getattr(owner, "__dict__", None)
        if isinstance(attributes, dict) and id(attributes) not in seen:
            seen.add(id(attributes))
            yield {name: v for name, v in attributes.items() if isinstance(name, str)}
