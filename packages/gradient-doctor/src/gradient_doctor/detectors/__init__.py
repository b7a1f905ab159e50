"""Detectors: each turns the facts of a session into findings of a few related classes."""

from __future__ import annotations

from gradient_doctor.detectors.accumulated import Accumulated
from gradient_doctor.detectors.activations import Activations
from gradient_doctor.detectors.adversaries import Adversaries
from gradient_doctor.detectors.averages import Averages
from gradient_doctor.detectors.axes import Axes
from gradient_doctor.detectors.beside import Beside
from gradient_doctor.detectors.best_models import BestModels
from gradient_doctor.detectors.blind import Blind
from gradient_doctor.detectors.branches import Branches
from gradient_doctor.detectors.ceased import Ceased
from gradient_doctor.detectors.clipping import Clipping
from gradient_doctor.detectors.constant_formulas import ConstantFormulas
from gradient_doctor.detectors.contract_names import ContractNames
from gradient_doctor.detectors.contractions import Contractions
from gradient_doctor.detectors.cosmetic import Cosmetic
from gradient_doctor.detectors.divergences import Divergences
from gradient_doctor.detectors.draws import Draws
from gradient_doctor.detectors.dropped import Dropped
from gradient_doctor.detectors.ends import Ends
from gradient_doctor.detectors.erased import Erased
from gradient_doctor.detectors.estimators import Estimators
from gradient_doctor.detectors.first_ratios import FirstRatios
from gradient_doctor.detectors.floors import Floors
from gradient_doctor.detectors.frozen import Frozen
from gradient_doctor.detectors.frozen_defaults import FrozenDefaults
from gradient_doctor.detectors.frozen_layers import FrozenLayers
from gradient_doctor.detectors.frozen_moves import FrozenMoves
from gradient_doctor.detectors.frozen_names import FrozenNames
from gradient_doctor.detectors.frozen_switches import FrozenSwitches
from gradient_doctor.detectors.grad_calls import GradCalls
from gradient_doctor.detectors.graph_reuse import GraphReuse
from gradient_doctor.detectors.hidden_writes import HiddenWrites
from gradient_doctor.detectors.in_place import InPlace
from gradient_doctor.detectors.indices import Indices
from gradient_doctor.detectors.inner_updates import InnerUpdates
from gradient_doctor.detectors.inverted_masks import InvertedMasks
from gradient_doctor.detectors.labels import Labels
from gradient_doctor.detectors.late import Late
from gradient_doctor.detectors.leaves import Leaves
from gradient_doctor.detectors.leftovers import Leftovers
from gradient_doctor.detectors.lengths import Lengths
from gradient_doctor.detectors.linear_nets import LinearNets
from gradient_doctor.detectors.magnitude import Magnitude
from gradient_doctor.detectors.masked_rows import MaskedRows
from gradient_doctor.detectors.misdirected import Misdirected
from gradient_doctor.detectors.missing import Missing
from gradient_doctor.detectors.mixed_types import MixedTypes
from gradient_doctor.detectors.moved_inputs import MovedInputs
from gradient_doctor.detectors.names import Names
from gradient_doctor.detectors.nobody import Nobody
from gradient_doctor.detectors.nonfinite import NonFinite
from gradient_doctor.detectors.normalised import RowSoftmax
from gradient_doctor.detectors.overlaps import Overlaps
from gradient_doctor.detectors.ownership import Ownership
from gradient_doctor.detectors.padding import Padding
from gradient_doctor.detectors.pairs import Pairs
from gradient_doctor.detectors.penalties import Penalties
from gradient_doctor.detectors.phases import Phases
from gradient_doctor.detectors.picked import Picked
from gradient_doctor.detectors.policy_losses import PolicyLosses
from gradient_doctor.detectors.precision import Precision
from gradient_doctor.detectors.ragged import Ragged
from gradient_doctor.detectors.ranges import Ranges
from gradient_doctor.detectors.recursions import Recursions
from gradient_doctor.detectors.rising import Rising
from gradient_doctor.detectors.rows import Rows
from gradient_doctor.detectors.samples import Samples
from gradient_doctor.detectors.scaler import Scaler
from gradient_doctor.detectors.scales import Scales
from gradient_doctor.detectors.schedule import Schedule
from gradient_doctor.detectors.shifts import Shifts
from gradient_doctor.detectors.signed_sums import SignedSums
from gradient_doctor.detectors.signs import Signs
from gradient_doctor.detectors.silent_functions import SilentFunctions
from gradient_doctor.detectors.soft_masks import SoftMasks
from gradient_doctor.detectors.spread import Spreads
from gradient_doctor.detectors.squashes import Squashes
from gradient_doctor.detectors.standing import Standing
from gradient_doctor.detectors.states import States
from gradient_doctor.detectors.statistics import Statistics
from gradient_doctor.detectors.surrogates import Surrogates
from gradient_doctor.detectors.swallowed import Swallowed
from gradient_doctor.detectors.targets import Targets
from gradient_doctor.detectors.unchanged import Unchanged
from gradient_doctor.detectors.unkept import Unkept
from gradient_doctor.detectors.unread import Unread
from gradient_doctor.detectors.zeros import Zeros
from gradient_doctor.explain import Ledger
from gradient_doctor.session import Detector, Session

# the ledger first: the others read it; what is left over by all others last
DETECTORS: tuple[type[Detector], ...] = (
    Ledger,
    Late,  # takes back what is no longer true, before anything is said
    Unread,  # before those who would call unseen parameters idle
    ContractNames,
    Frozen,
    FrozenLayers,
    FrozenDefaults,
    FrozenNames,
    FrozenSwitches,
    FrozenMoves,
    Ownership,
    Nobody,
    Leaves,
    Erased,
    Accumulated,
    Leftovers,
    GraphReuse,
    InPlace,
    HiddenWrites,
    Precision,
    MixedTypes,
    Scaler,
    GradCalls,
    MovedInputs,
    InnerUpdates,
    Beside,  # before what says of each part where its path ends
    Missing,
    Ceased,
    Samples,
    States,
    Cosmetic,
    SignedSums,
    Misdirected,
    Dropped,
    Targets,
    Indices,
    Shifts,
    Axes,
    Rows,
    RowSoftmax,
    Contractions,
    Pairs,
    Penalties,
    Activations,
    Lengths,
    Labels,
    InvertedMasks,
    Ends,
    SoftMasks,
    Padding,  # before what an empty mask leads to: zeros, and numbers that are none
    Ragged,
    MaskedRows,
    SilentFunctions,
    ConstantFormulas,
    Zeros,
    Floors,
    Picked,
    Ranges,
    NonFinite,
    Unchanged,
    Averages,
    Standing,
    BestModels,
    Schedule,
    Branches,
    Magnitude,
    Spreads,
    Clipping,
    Estimators,
    Squashes,
    PolicyLosses,
    Surrogates,
    FirstRatios,
    Recursions,
    Draws,
    Divergences,
    Signs,
    Overlaps,
    Adversaries,
    Names,
    Unkept,
    Rising,
    Statistics,
    Scales,  # what others have explained is not said again
    Swallowed,
    Phases,
    LinearNets,
    Blind,
)


def all_detectors(session: Session) -> list[Detector]:
    return [make(session) for make in DETECTORS]
