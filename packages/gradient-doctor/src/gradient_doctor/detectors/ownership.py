"""Classes 6, 7 and 8: who owns the parameters that receive gradients?

6: a parameter that is made anew in every step. 7: a parameter that lasts and is in no optimizer.
8: as 7, while an optimizer holds its idle double; or an optimizer whose state does not fit.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from torch import Tensor, nn

from gradient_doctor.detectors.places import birth_site, by_site, called, count, most_common
from gradient_doctor.findings import Severity, Site
from gradient_doctor.readable import FAKE, META, SHARDED, checksum, unreadable
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, Event, OpCall, Session, StepRecord
from gradient_doctor.unregistered import kept_in

# state of torch's optimizers that has the shape of its parameter
_LIKE_PARAMETER = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg"),
    *("acc_delta", "exp_inf", "ax", "prev"),
)
_ANEW = 4  # optimizers of one line that stepped once
_WINDOWS = 3  # steps of an optimizer
_LOOKS = 3  # that parameters in no optimizer ask for
_LASTS = 3  # backwards that reach a plain tensor
_PRODUCTS = {"matmul", "mm", "bmm", "einsum", "linear", "conv1d", "conv2d", "embedding", "addmm"}


class Ownership(Detector):
    """Compares what receives gradients with what the optimizers hold."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._received = self._again = 0  # by any backward; by two or more
        # by the optimizer's id: by a backward since its last step, and before the last few ones
        self._since: dict[int, int] = {}
        self._windows: dict[int, list[int]] = {}
        self._looks = _LOOKS
        self._outlives: set[Site] = set()  # birth lines of what was made before the step
        self._sums: dict[int, float] = {}  # of parameters in no optimizer: do they change?
        self._copies = 0  # that began as copies of what an optimizer trains: targets, teachers
        self._fresh: dict[Site, dict[int, int]] = {}  # birth line -> step -> parameters
        self._born_in_loop: set[Site] = set()
        self._was_frozen = 0  # when training began, and in no optimizer
        self._frozen_sums: dict[int, float] = {}
        self._originals: dict[
            Site, list[Any]
        ] = {}  # birth line of copies -> what they are copies of
        self._behind: dict[Any, int] = {}  # birth line -> what the values were computed from
        self._built: dict[Site, Site | None] = {}  # birth line -> that of the module around it
        self._steps: dict[int, Site | None] = {}  # optimizers that have stepped, and where
        self._loaded: dict[int, Site | None] = {}
        self._said = 0
        self._anew: dict[Site, dict[int, int]] = {}  # line of an optimizer -> steps of each
        self._held: dict[Site, frozenset[int]] = {}  # the parameters of the first of that line
        self._plain: dict[int, int] = {}  # tensors that are no parameters -> backwards
        self._weights = 0  # plain tensors that hidden values are multiplied by
        self._inputs = 0  # that autograd.grad was asked for
        self._checked_states: set[int] = set()

    # facts

    def op(self, call: OpCall) -> None:
        """In functions without modules a weight is a plain tensor; what it is, its use tells."""
        if call.short not in _PRODUCTS or len(call.inputs) < 2:
            return
        leaves = [
            t
            for t in call.inputs
            if t.requires_grad and t.is_leaf and not isinstance(t, nn.Parameter)
        ]
        if leaves and any(t.requires_grad and not t.is_leaf for t in call.inputs):
            self._weights |= self.session.registry.bits(leaves)

    def backward_ended(self, backward: Backward) -> None:
        registry = self.session.registry
        if backward.kind == "grad" and self.session.record.checked:
            self._inputs |= registry.bits(t for t in backward.inputs or () if t.is_leaf)
        if backward.kind != "backward" or not self.session.record.checked:
            return
        self._receive(backward.received)
        for parameter in registry.tensors(backward.received & ~registry.owned):
            if not isinstance(parameter, nn.Parameter):
                # an input that asked for a gradient: an embedding, an attack; see `_attributes`
                bit = registry.bit(parameter)
                self._plain[bit] = self._plain.get(bit, 0) + 1
                self._sums.setdefault(bit, checksum(parameter))
                continue
            if unreadable(parameter) in (META, FAKE):
                continue  # no weights: somebody counts operations, or plans
            bit = registry.bit(parameter)
            if bit not in self._sums:
                if not self.session.record.traced and self._looks:
                    self._looks -= 1  # will it be there in the next step, too?
                    self.session.look_again = True
                self._sums[bit] = checksum(parameter)
                self._note_copy(parameter, backward)
            birth = registry.birth(parameter)
            if birth is not None and birth.site is not None:
                per_step = self._fresh.setdefault(birth.site, {})
                per_step[backward.step] = per_step.get(backward.step, 0) | bit
                home = registry.home(parameter)
                original = registry.copy_of.get(parameter)
                if original is not None and original() is not None:
                    self._originals.setdefault(birth.site, []).append(original)
                taint = self.session.taints.get(parameter)
                if taint is not None:
                    place, before = birth.site.place, taint.depends & ~taint.live
                    self._behind[place] = self._behind.get(place, 0) | before
                if home is not None:
                    top = registry.top_of(home)
                    # a module that lasts and makes its own parameter anew is no layer to move
                    if registry.constructed_before(top, birth.step):
                        self._built[birth.site] = None
                    self._built.setdefault(birth.site, registry.construction(top))
                if birth.step < backward.step:
                    self._outlives.add(birth.site)
                # the first step of a script includes the making of its models
                if self.session.first < birth.step == backward.step:
                    self._born_in_loop.add(birth.site)

    def _note_copy(self, orphan: Tensor, backward: Backward) -> None:
        """A target network is refreshed every so often; only the end tells whether it was."""
        registry = self.session.registry
        value = self._sums[registry.bit(orphan)]
        if any(
            p.shape == orphan.shape and checksum(p) == value
            for p in registry.tensors(backward.received & registry.owned)
        ):
            self._copies |= registry.bit(orphan)

    def start(self) -> None:
        registry = self.session.registry
        for parameter in registry.parameters().values():
            if isinstance(parameter, nn.Parameter) and not parameter.requires_grad:
                bit = registry.bit(parameter)
                if not bit & registry.owned and unreadable(parameter) is None:
                    self._was_frozen |= bit
                    self._frozen_sums[bit] = checksum(parameter)

    def event(self, event: Event) -> None:
        if event.kind == "grad_set" and not event.data["empty"]:
            self._receive(self.session.registry.bit(event.data["parameter"]))
        elif event.kind == "new_part":
            self._since.clear()
            self._windows.clear()
        elif event.kind == "step_starts":
            if self.session.record.checked:
                self._check_state(event.data["optimizer"], event.site)
        elif event.kind == "step":
            self._steps[id(event.data["optimizer"])] = event.site
            self._close_window(event.data["optimizer"])
            self._begins_anew(event.data["optimizer"])
        elif event.kind == "load_state":
            self._loaded[id(event.data["optimizer"])] = event.site
            self._checked_states.discard(id(event.data["optimizer"]))
            self._check_names(event)

    def _receive(self, parameters: int) -> None:
        self._again |= self._received & parameters
        self._received |= parameters
        for optimizer in self.session.registry.optimizers.values():
            self._since[id(optimizer)] = self._since.get(id(optimizer), 0) | parameters

    def _lately(self, optimizer: Any) -> int:
        """What received gradients around the last steps of an optimizer that were looked at."""
        mask = self._since.get(id(optimizer), 0)
        for window in self._windows.get(id(optimizer), ()):
            mask |= window
        return mask

    def _close_window(self, optimizer: Any) -> None:
        if self.session.record.checked:
            windows = self._windows.setdefault(id(optimizer), [])
            windows.append(self._since.pop(id(optimizer), 0))
            del windows[:-_WINDOWS]

    def step_ended(self, record: StepRecord) -> None:
        if record.checked and self.session.age + 1 >= self.session.trace_steps:
            self._judge(final=False)

    def finish(self, error: BaseException | None) -> None:
        self._judge(final=True)

    # verdicts

    def _judge(self, final: bool) -> None:
        registry = self.session.registry
        thrown = self._thrown_away(final)
        if not self._steps:
            return  # nobody has trained anything: nothing is missing from it
        if any(unreadable(p) == SHARDED for o in registry.optimizers.values() for p in owned_by(o)):
            return  # forwards take other tensors than the optimizer holds, by design; see unread.py
        # optimizers that are made one by one when they first step share the first backward
        received = self._received if final else self._again & ~self._copies
        orphans: list[Tensor] = [
            p
            for p in registry.tensors(received & ~registry.owned & ~self._said & ~thrown)
            if (isinstance(p, nn.Parameter) or self._is_attribute(p))
            # updated by hand, or by something that is no torch optimizer
            and self._sums.get(registry.bit(p)) == checksum(p)
        ]
        left = self._doubles(orphans)
        self._said |= registry.bits(orphans)
        if left:
            self._unowned(left)
        if final:
            self._strangers()
            self._thawed(thrown)

    def _is_attribute(self, tensor: Tensor) -> bool:
        """A tensor that a module keeps as a plain attribute, and that every backward reaches.

        Or one that is used as a weight where the optimizer holds plain tensors, too.
        """
        registry = self.session.registry
        bit = registry.bit(tensor)
        if self._plain.get(bit, 0) < _LASTS or bit & self.session.gradients_read:
            return False
        if bit & self._weights & ~self._inputs:
            held = [p for o in registry.optimizers.values() for p in owned_by(o)]
            if held and not any(isinstance(p, nn.Parameter) for p in held):
                return True
        modules = [m for root in registry.roots.values() for m in root.modules()]
        return any(tensor is value for m in modules for value in vars(m).values())

    def _thrown_away(self, final: bool) -> int:
        """Class 6. Gives the parameters that were made anew in every step."""
        registry = self.session.registry
        thrown = 0
        for site, per_step in self._fresh.items():
            if site in self._outlives:
                continue  # made now and then, for many steps: a model of each round
            masks = list(per_step.values())
            anew = len(masks) > 1 and not any(
                a & b for i, a in enumerate(masks) for b in masks[i + 1 :]
            )
            gone = final and not any(True for mask in masks for _ in registry.tensors(mask))
            if not ((anew and site in self._born_in_loop) or gone):
                continue
            union = 0
            for mask in masks:
                union |= mask
            thrown |= union
            # if the user's own code looks at their gradients, they have served: an attack
            if union & (self._said | self.session.gradients_read):
                continue
            self._said |= union
            leaves = [
                registry.leaves[k] for k in range(masks[-1].bit_length()) if masks[-1] >> k & 1
            ]
            registry.thrown_away[site] = leaves[0]
            if self._copied(site, union) or self._remade(site):
                continue
            shapes = ", ".join(str(list(leaf.shape or ())) for leaf in leaves[:4])
            number = count(len(leaves), "parameter")
            self.report(
                6,
                Severity.ERROR,
                f"{number} ({shapes}) created again in every step and thrown away after it.",
                why=f"In {count(len(masks), 'step')} the loss reached other tensors made by this "
                "line. They are in no module that lasts and in no optimizer: what flows into them "
                "is lost, and the layer is random again in the next step.",
                fix="Make the layer once, in __init__ of the module (or before the loop), and "
                "build the optimizer after it.",
                site=self._built.get(site) or site,
                related=(site,),
            )
        return thrown

    def _copied(self, site: Site, union: int) -> bool:
        """Class 3: the loss reaches copies of parameters, and so not the parameters themselves."""
        registry, ledger = self.session.registry, self.session.ledger
        hidden = registry.bits(
            original
            for original in (ref() for ref in self._originals.get(site, ()))
            if original is not None
        )
        hidden &= ledger.should_train() & ~ledger.received
        if not hidden:
            return False
        ledger.explained |= hidden
        self.report(
            3,
            Severity.ERROR,
            f"The loss depends on copies of {count(hidden.bit_count(), 'parameter')}, and "
            "reaches only those.",
            why="deepcopy makes new leaves, outside of the graph of the originals, and what is "
            "done to their .data leaves no trace either: the optimizer's parameters get nothing.",
            fix="Compute with the parameters themselves: torch.func.functional_call(model, "
            "{name: p - rate * g}, inputs).",
            site=site,
            parameters=hidden,
        )
        return True

    def _remade(self, site: Site) -> bool:
        """Class 3: a computed value is made a parameter, which is a new leaf in every step."""
        ledger = self.session.ledger
        hidden = self._behind.get(site.place, 0) & ledger.should_train()
        if not hidden:
            return False
        ledger.explained |= hidden & ~ledger.received
        self.report(
            3,
            Severity.ERROR,
            "`nn.Parameter` makes a new leaf of a computed value: its gradient ends there.",
            why=f"The value was computed from {self.session.registry.many(hidden)}. A parameter "
            "has no history, and this one is made again in every step: its gradient is used by "
            "nobody, and nothing reaches what it was computed from.",
            fix="Use the computed tensor as it is: pass it on as an argument, or with "
            "torch.func.functional_call. A module that must hold it keeps it as a plain attribute.",
            site=site,
            parameters=hidden,
        )
        return True

    def _doubles(self, orphans: list[Tensor]) -> list[Tensor]:
        """Class 8. Gives the orphans for which no optimizer holds an idle double."""
        registry = self.session.registry
        left = orphans
        for name, optimizer in registry.optimizers.items():
            held = list(owned_by(optimizer))
            lately = self._lately(optimizer)
            idle = [p for p in held if p.requires_grad and not registry.bit(p) & lately]
            theirs, mine = Counter(map(_form, idle)), Counter(map(_form, left))
            if not idle or not left:
                continue
            matched: list[Tensor] = []
            # one shape in common is chance; all shapes of one side are a copy
            if mine <= theirs or theirs <= mine:
                for parameter in left:
                    if theirs[_form(parameter)] > 0:
                        theirs[_form(parameter)] -= 1
                        matched.append(parameter)
            elif not any(registry.is_registered(p) for p in idle):
                # parts that no model has any more, and newer parts in their place
                matched = [p for p in left if self._made_after(p, optimizer)]
            if not matched:
                continue
            left = [p for p in left if not any(p is m for m in matched)]
            if self.session.ledger is not None:
                self.session.ledger.explained |= registry.bits(idle)
            self._stale(name, optimizer, held, matched)
        return left

    def _stale(self, name: str, optimizer: Any, held: list[Tensor], trained: list[Tensor]) -> None:
        registry = self.session.registry
        birth = registry.birth(optimizer)
        later = [p for p in trained if self._made_after(p, optimizer)]
        born = most_common(registry.entered(p, optimizer) for p in trained)
        at = None if birth is None else birth.site
        if len(later) == len(trained):
            loaded = all(self._is_unpickled(p) for p in trained)
            # a function that makes both is not at fault: the second call of it is
            twins = [p for p in held if _form(p) == _form(trained[0])]
            apart = next(filter(None, (registry.called_apart(trained[0], p) for p in twins)), None)
            site, when = (at if loaded else apart or born), f" They were made after {name}."
        else:
            site, when = at or self._steps.get(id(optimizer)) or born, ""
        lately = self._lately(optimizer)
        gets = sum(bool(registry.bit(p) & lately) for p in held)
        self.report(
            8,
            Severity.ERROR,
            f"The {called(name)} steps idle doubles instead of "
            f"{count(len(trained), 'parameter')} "
            "of the model.",
            why=f"{name} owns {count(len(held), 'parameter')}, of which {gets} receive a "
            f"gradient; the model has {len(trained)} in their place that receive one and are in "
            f"no optimizer.{when}",
            fix="Build the optimizer from the parameters of the model that is trained, after the "
            "last copy, reload or exchange of its parts.",
            site=site,
            parameters=registry.bits(trained),
            related=(at, born),
        )

    def _is_unpickled(self, parameter: Tensor) -> bool:
        """Its module came whole out of a file: neither constructed nor copied in this run."""
        registry = self.session.registry
        # torch tells of parameters that are given to a module, not of those that come with it
        return registry.home(parameter) is None and parameter not in registry.copy_of

    def _strangers(self) -> None:
        """Class 8: held by an optimizer, but no model has them and no operation ever took them."""
        registry, ledger = self.session.registry, self.session.ledger
        if ledger is None or not ledger.traced:
            return
        for name, optimizer in registry.optimizers.items():
            if id(optimizer) not in self._steps:
                continue
            strange = [
                p
                for p in owned_by(optimizer)
                if p.requires_grad
                and not registry.is_registered(p)
                and not registry.bit(p) & (self._received | ledger.seen | ledger.explained)
            ]
            birth = registry.birth(optimizer)
            if not strange:
                continue
            ledger.explained |= registry.bits(strange)
            shapes = ", ".join(str(list(p.shape)) for p in strange[:4])
            self.report(
                8,
                Severity.WARNING,
                f"The {called(name)} holds {count(len(strange), 'parameter')} ({shapes}) that "
                "no model has.",
                why=f"Of the {count(len(list(owned_by(optimizer))), 'parameter')} of {name} these "
                "are in no module, and no operation of the traced steps took them: they were "
                "replaced (tied, swapped, reloaded) after the optimizer was made, and it keeps "
                "them and their moments in memory.",
                fix="Build the optimizer after the last exchange of the model's parts.",
                site=None if birth is None else birth.site,
                related=(birth_site(registry, strange[0]), self._steps[id(optimizer)]),
            )

    def _thawed(self, thrown: int) -> None:
        """Class 7, unfrozen between two looks: a gradient is there that nobody clears or uses."""
        registry = self.session.registry
        thawed: list[Tensor] = [
            p
            for p in registry.parameters().values()
            if isinstance(p, nn.Parameter)
            and p.requires_grad
            and p.grad is not None
            and registry.bit(p) & self._was_frozen
            and not registry.bit(p) & (registry.owned | self._said | thrown)
            and self._frozen_sums.get(registry.bit(p)) == checksum(p)
        ]
        self._said |= registry.bits(thawed)
        if thawed:
            self._unowned(thawed)

    def _unowned(self, orphans: list[Tensor]) -> None:
        """Class 7."""
        registry = self.session.registry
        for site, mask in by_site(registry, orphans, self._forgotten_at).items():
            parameters = list(registry.tensors(mask))
            size = sum(p.numel() for p in parameters)
            late = [p for p in parameters if self._is_late(p)]
            after = f" They were made after {', '.join(registry.optimizers)}." if late else ""
            if not any(registry.is_registered(p) for p in parameters):
                after += " No module has them registered, so model.parameters() leaves them out."
            self.report(
                7,
                Severity.WARNING,
                f"{count(len(parameters), 'parameter')} with a gradient in no optimizer.",
                why=f"Every backward computes gradients for their {size:,} numbers, "
                f"and no optimizer ever uses them: they keep their values.{after}",
                fix="Add them: optimizer.add_param_group({'params': ...}), or make them before "
                "the optimizer. If they should stay as they are, requires_grad_(False) saves the "
                "memory and the work. Layers in a list or dict belong into nn.ModuleList or "
                "nn.ModuleDict.",
                site=site,
                parameters=mask,
                related=(birth_site(registry, parameters[0]),),
            )

    def _made_after(self, parameter: Tensor, optimizer: Any) -> bool:
        births = self.session.registry.birth(parameter), self.session.registry.birth(optimizer)
        return births[0] is not None and births[1] is not None and births[0].order > births[1].order

    def _is_late(self, parameter: Tensor) -> bool:
        optimizers = self.session.registry.optimizers.values()
        return all(self._made_after(parameter, optimizer) for optimizer in optimizers)

    def _forgotten_at(self, parameter: Tensor) -> Site | None:
        """The line of the optimizer that should hold it; of the parameter, if that came later."""
        registry = self.session.registry
        born = birth_site(registry, parameter)
        if not registry.is_registered(parameter):
            # in a plain list or dict of a module, `.parameters()` cannot find it
            modules = [m for root in registry.roots.values() for m in root.modules()]
            plain = None if isinstance(parameter, nn.Parameter) else self._optimizer_of_plain()
            return kept_in(parameter, modules) or plain or born
        if self._is_late(parameter):
            sites = [registry.entered(parameter, o) for o in registry.optimizers.values()]
            return most_common(sites) or born
        root = registry.name(parameter).split(".")[0]
        double = self._double_optimizer(root)
        if double is not None:
            return double
        best: tuple[int, int] = (-1, -1)
        site: Site | None = None
        for optimizer in registry.optimizers.values():
            birth = registry.birth(optimizer)
            if birth is None:
                continue
            siblings = sum(registry.name(p).split(".")[0] == root for p in owned_by(optimizer))
            if (siblings, birth.order) > best:
                best, site = (siblings, birth.order), birth.site
        return site or born

    def _optimizer_of_plain(self) -> Site | None:
        """The line that made the last optimizer of plain tensors."""
        registry = self.session.registry
        sites = [
            birth_site(registry, optimizer)
            for optimizer in registry.optimizers.values()
            if not any(isinstance(p, nn.Parameter) for p in owned_by(optimizer))
        ]
        return sites[-1] if sites else None

    def _double_optimizer(self, root: str) -> Site | None:
        """Of two optimizers with the same parameters, the line of the one that is named for
        another model: it has been handed the wrong one."""
        optimizers = self.session.registry.optimizers
        held = {name: frozenset(map(id, owned_by(o))) for name, o in optimizers.items()}
        doubles = [name for name in held if list(held.values()).count(held[name]) > 1]
        # the later one was written after the model of the earlier one, and copied from there
        named = [n for n in doubles if _words(n) & _words(root)] or doubles[-1:]
        return birth_site(self.session.registry, optimizers[named[0]]) if named else None

    # the state of optimizers

    def _check_state(self, optimizer: Any, site: Site | None) -> None:
        """Class 8: moments that do not have the shape of their parameter."""
        if not type(optimizer).__module__.startswith("torch.optim"):
            return  # others factorise, quantise, shard
        if id(optimizer) in self._checked_states or not optimizer.state:
            return
        self._checked_states.add(id(optimizer))
        wrong: list[tuple[Tensor, str, Tensor]] = []
        for parameter in owned_by(optimizer):
            state = optimizer.state.get(parameter) or {}
            for key in _LIKE_PARAMETER:
                value = state.get(key)
                if isinstance(value, Tensor) and value.shape != parameter.shape:
                    wrong.append((parameter, key, value))
        if wrong:
            registry = self.session.registry
            parameter, key, value = wrong[0]
            self.report(
                8,
                Severity.ERROR,
                f"The state of {registry.optimizer_name(optimizer)} does not fit its parameters.",
                why=f"{registry.name(parameter)} has shape {list(parameter.shape)}, but its {key} "
                f"has {list(value.shape)}; {len(wrong)} such tensors.",
                fix="Load the state by name, or start the optimizer without it.",
                site=self._loaded.get(id(optimizer)) or site,
                parameters=registry.bits(p for p, _, _ in wrong),
            )

    def _begins_anew(self, optimizer: Any) -> None:
        """Class 8: a new optimizer in every step forgets its moments, the old one's are lost."""
        registry = self.session.registry
        birth = registry.birth(optimizer)
        if birth is None or birth.site is None or not optimizer.state:
            return
        line = self._anew.setdefault(birth.site, {})
        number = line[id(optimizer)] = line.get(id(optimizer), 0) + 1
        held = frozenset(map(id, owned_by(optimizer)))
        same = self._held.setdefault(birth.site, held) == held
        if not same or number > 1 or len(line) < _ANEW or max(line.values()) > 1:
            return
        if not any(_moments(optimizer.state.get(p) or {}) for p in owned_by(optimizer)):
            return
        self.report(
            8,
            Severity.WARNING,
            "A new optimizer is made for every step.",
            why=f"{len(line)} optimizers of this line have stepped once each on the same "
            "parameters: momentum, second moments and bias correction begin at 0 every time, so "
            f"{type(optimizer).__name__} is not what runs.",
            fix="Make the optimizer once, before the loop.",
            site=birth.site,
            parameters=registry.bits(owned_by(optimizer)),
            related=(self._steps.get(id(optimizer)),),
        )

    def _check_names(self, event: Event) -> None:
        """Class 8: a state saved under other names, or in another order, than ours."""
        optimizer, state = event.data["optimizer"], event.data["state"]
        saved = [n for g in state.get("param_groups", ()) for n in g.get("param_names", ())]
        ours = [n for g in optimizer.param_groups for n in g.get("param_names", ())]
        if not saved or len(saved) != len(ours) or saved == ours:
            return
        swapped = [(a, b) for a, b in zip(saved, ours) if a != b]
        self.report(
            8,
            Severity.ERROR,
            "The optimizer state is loaded into other parameters than it was saved from.",
            why=f"{len(swapped)} of {len(ours)} names differ; the state of {swapped[0][0]} goes to "
            f"{swapped[0][1]}.",
            fix="Rebuild the parameter groups in the order of the checkpoint, or map by name.",
            site=event.site,
            parameters=tuple(b for _, b in swapped),
        )


def _moments(state: Any) -> bool:
    """Whether an optimizer's state is worth keeping: tensors of more than a step's count."""
    return any(isinstance(value, Tensor) and value.numel() > 1 for value in state.values())


def _words(name: str) -> set[str]:
    """The words of a variable's name: `opt_g` and `G` share one."""
    return {word for word in re.split(r"[^a-z]+", name.lower()) if word}


def _form(parameter: Tensor) -> tuple[int, ...]:
    return tuple(parameter.shape)
