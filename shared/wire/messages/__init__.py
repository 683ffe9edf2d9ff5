"""Every message of the mesh, grouped by the link it travels on.

On the wire a message is a msgpack array ``[tag, field, …]``. Tags are written out and never reused;
fields are only ever appended, with a default, so that a decoder of the same protocol major accepts
fewer or more trailing fields. Arrays of tokens travel after the header as raw buffers
(``codec.py``); each docstring names them. Messages going down are verbs, messages coming up nouns.

Submit → Generate → StepPlan → gateway ⇄ tokenizer ⇄ scheduler ⇄ worker ← Deltas ← Tokens ←
StepResult Cancel and Credit walk down. Accepted, then Finished (in Tokens and Deltas) or Failed,
comes up.

Every number and every name has its range here, and ``decode`` refuses values outside it: a receiver
checks ids and counts only against its own state.

A request of a client is named ``id~nonce``, each of its prompts ``id~nonce/prompt``, and each
choice of a prompt, which is one sequence, ``id~nonce/prompt/choice``.

Each link has a file here, and all names are imported from this package.
"""

from shared.wire.messages.adapters import *
from shared.wire.messages.every_link import *
from shared.wire.messages.gateway_tokenizer import *
from shared.wire.messages.media import *
from shared.wire.messages.moves import *
from shared.wire.messages.ranges import *
from shared.wire.messages.rows import *
from shared.wire.messages.scheduler_worker import *
from shared.wire.messages.stores import *
from shared.wire.messages.tokenizer_scheduler import *
from shared.wire.messages.upper_links import *

Message = (
    Hello
    | Heartbeat
    | Bye
    | Refused
    | Submit
    | Generate
    | Cancel
    | StepPlan
    | Reset
    | Assemble
    | Credit
    | Convert
    | Abort
    | Inquire
    | Accepted
    | Tokens
    | Deltas
    | StepResult
    | Failed
    | Release
    | Attach
    | Detach
    | Lost
    | Converted
    | Vocabulary
    | ServiceReport
    | Adapters
    | LoadAdapter
    | UnloadAdapter
    | ForgetAdapter
    | Encoded
    | Inventory
    | Copied
    | Inbox
    | Meet
    | Pushed
    | Arrived
    | Settled
    | Encode
    | Features
    | Spilled
    | Fetched
)

TOKEN_ARRAYS = ({"i4"}, {"f4"}, {"i4"}, {"i4"})

# Allowed dtypes of each array of a message. Arrays have one dimension; other messages have none.
ARRAYS: dict[type, tuple[set[str], ...]] = {
    Submit: ({"u1", "i4"}, {"i4"}),
    Generate: ({"i4"}, {"i4"}),
    StepPlan: ({"i4"},),
    Convert: ({"u1", "i4"},),
    Accepted: ({"i4"},),
    Tokens: TOKEN_ARRAYS,
    Deltas: TOKEN_ARRAYS,
    StepResult: TOKEN_ARRAYS,
    Converted: ({"u1", "i4", "i8"},),
    Vocabulary: ({"u1"}, {"i4"}),
    Inventory: ({"u1"}, {"i4"}),
    Encode: ({"u1"},),
    Features: ({"u1"},),
}
# Of any number of further ones, which are files, pixels or KV blocks.
MORE_ARRAYS: dict[type, set[str]] = {
    each: {"u1"} for each in (Submit, Convert, Generate, StepPlan, Pushed)
}
