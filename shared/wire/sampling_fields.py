"""The sampling parameters with values recommended by a model's authors."""

from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from shared.wire.messages import SamplingDefaults


class SamplingFields(Struct, kw_only=True):
    """The fields of requests and generation_config.json; null means the default. ``top_k`` −1 and 0
    are off."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_n_sigma: Annotated[float, Meta(ge=0, le=100)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None


def with_fields(defaults: SamplingDefaults, fields: SamplingFields) -> SamplingDefaults:
    """Returns ``defaults`` with the values set in ``fields``."""
    values = {name: getattr(fields, name) for name in SamplingFields.__struct_fields__}
    given = {name: value for name, value in values.items() if value is not None}
    sampling = replace(defaults, **given)
    return replace(sampling, top_k=max(sampling.top_k, 0))
