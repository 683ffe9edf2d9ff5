"""Writes the golden files of this folder: small layers quantized and packed by each format's own
tools, and the weights read back by those tools.

No test runs this. Each part needs packages that are not dependencies of Shoal; README.md in this
folder names them, with the tool and version of each folder:

python tests/services/worker/golden/make.py PART...
"""

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
ATTENTION = "model.layers.0.self_attn"
SHAPES = {"q_proj": (20, 256), "k_proj": (12, 256)}

Shapes = Mapping[str, tuple[int, int]]


def make_model(shapes: Shapes, dtype: torch.dtype) -> nn.Module:
    """Linear layers of ``shapes`` in place of a decoder's attention projections."""
    generator = torch.Generator().manual_seed(0)
    attention = nn.Module()
    for name, (num_outputs, num_inputs) in shapes.items():
        linear = nn.Linear(num_inputs, num_outputs, bias=False, dtype=dtype)
        sizes = torch.exp(torch.randn(num_outputs, 1, generator=generator) / 2)
        weight = torch.randn(num_outputs, num_inputs, generator=generator) * sizes * 0.02
        linear.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        attention.add_module(name, linear)
    model = attention
    for name in reversed(ATTENTION.split(".")):
        parent = nn.Module()
        parent.add_module(name, model)
        model = parent
    return model


def linears_of(model: nn.Module, shapes: Shapes) -> dict[str, Any]:
    return {f"{ATTENTION}.{name}": model.get_submodule(f"{ATTENTION}.{name}") for name in shapes}


def save(
    folder: str,
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    quantization_config: Mapping[str, Any] | None = None,
) -> None:
    """Without ``quantization_config`` the tool writes that file itself."""
    place = HERE / folder
    place.mkdir(exist_ok=True)
    assert all(weight.dtype == torch.float32 for weight in expected.values())
    packed = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(packed, place / "model.safetensors", {"format": "pt"})
    weights = {f"{name}.weight": weight.contiguous() for name, weight in expected.items()}
    save_file(weights, place / "expected.safetensors")
    if quantization_config is not None:
        text = json.dumps({"quantization_config": quantization_config}, indent=2, sort_keys=True)
        (place / "config.json").write_text(text + "\n")


def check_near(expected: Tensor, official: Tensor) -> None:
    """``official`` was computed in its own type, narrower than float32."""
    rounding = torch.finfo(official.dtype).eps
    torch.testing.assert_close(expected, official.float(), rtol=2 * rounding, atol=0)


def compressed_tensors() -> None:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    def preset(name: str) -> QuantizationScheme:
        return preset_name_to_scheme(name, ["Linear"])

    def weight_only(**weights: Any) -> QuantizationScheme:
        return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))

    blocks = {"q_proj": (136, 40), "k_proj": (8, 168)}
    short = {"q_proj": (20, 128), "k_proj": (12, 128)}
    asymmetric = weight_only(num_bits=4, group_size=32, strategy="group", symmetric=False)
    compress("compressed-tensors-int4-group128", preset("W4A16"))
    compress("compressed-tensors-int4-group32-asymmetric", asymmetric, short)
    compress("compressed-tensors-int4-channel", weight_only(num_bits=4, strategy="channel"), short)
    compress("compressed-tensors-int8-group128", preset("W8A16"))
    compress("compressed-tensors-int8-channel", weight_only(num_bits=8, strategy="channel"), short)
    compress("compressed-tensors-int8-activations", preset("W8A8"), short)
    compress("compressed-tensors-fp8-tensor", preset("FP8"), short)
    compress("compressed-tensors-fp8-channel", preset("FP8_DYNAMIC"), short)
    compress("compressed-tensors-fp8-block", preset("FP8_BLOCK"), blocks)
    compress("compressed-tensors-mxfp4", preset("MXFP4A16"), short)
    compress("compressed-tensors-nvfp4", preset("NVFP4A16"), short)


def compressed_tensors_g_idx() -> None:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    ordered = QuantizationArgs(num_bits=4, group_size=64, strategy="group", actorder="group")
    scheme = QuantizationScheme(targets=["Linear"], weights=ordered)
    compress("compressed-tensors-int4-group64-g-idx", scheme)


def compressed_tensors_mxfp8() -> None:
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    shapes = {"q_proj": (20, 128), "k_proj": (12, 128)}
    compress("compressed-tensors-mxfp8", preset_name_to_scheme("MXFP8A16", ["Linear"]), shapes)


def compress(folder: str, scheme: Any, shapes: Shapes = SHAPES) -> None:
    from compressed_tensors.compressors import BaseCompressor, ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = make_model(shapes, torch.bfloat16)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config, show_progress=False)
    for number, linear in enumerate(linears_of(model, shapes).values()):
        calibrate(linear, 0.02 + 0.01 * number)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    expected = {}
    for name, linear in linears_of(model, shapes).items():
        tensors = linear.state_dict()
        chosen = linear.quantization_scheme
        expected[name] = decompress(tensors, chosen)
        reader = BaseCompressor.get_value_from_registry(chosen.format)
        check_near(expected[name], reader.decompress(tensors, chosen)["weight"])
    save(folder, model.state_dict(), expected)
    compressor.update_config(str(HERE / folder))


def calibrate(linear: Any, input_scale: float) -> None:
    """Sets scales and zero points for the unchanged weight."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = linear.quantization_scheme.weights
    weight = linear.weight
    if hasattr(linear, "weight_g_idx"):
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
        groups = order // args.group_size
        linear.weight_g_idx.data.copy_(groups)
        weight = weight[:, groups.argsort(stable=True)]
    smallest, largest = ranges_of(weight, args)
    global_scale = None
    if hasattr(linear, "weight_global_scale"):
        global_scale = generate_gparam(smallest.min(), largest.max())
        linear.weight_global_scale.data.copy_(global_scale)
    scale, zero_point = calculate_qparams(smallest, largest, args, global_scale)
    linear.weight_scale.data.copy_(scale)
    linear.weight_zero_point.data.copy_(zero_point)
    if hasattr(linear, "input_scale"):
        linear.input_scale.data.fill_(input_scale)


def ranges_of(weight: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    """Smallest and largest weight per scale, in the shape of the scales."""
    from compressed_tensors.quantization.utils import maybe_pad_tensor_for_block_quant

    match args.strategy:
        case "tensor":
            return weight.min().reshape(1), weight.max().reshape(1)
        case "channel":
            return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        case "block":
            height, width = args.block_structure
            padded = maybe_pad_tensor_for_block_quant(weight, args.block_structure)
            blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
            return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.unflatten(1, (-1, args.group_size))
    return groups.amin(2), groups.amax(2)


def decompress(tensors: Mapping[str, Tensor], scheme: Any) -> Tensor:
    """In float32, like the compressors in the type of their scales."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    reader = BaseCompressor.get_value_from_registry(scheme.format)
    if "mxfp8" in scheme.format:
        return reader.decompress(tensors, scheme)["weight"].float()  # bfloat16 is exact
    if "fp4" not in scheme.format:
        scale = tensors["weight_scale"].float()
        return reader.decompress({**tensors, "weight_scale": scale}, scheme)["weight"]
    packed = tensors["weight_packed"]
    codes = unpack_fp4_from_uint8(packed, len(packed), 2 * packed.shape[1], torch.float32)
    scale = reader._decompress_scale(tensors["weight_scale"], torch.float32)
    return dequantize(
        codes, scale, args=scheme.weights, global_scale=tensors.get("weight_global_scale")
    )


def gptq() -> None:
    pack_gptq("gptq-int4-group128", bits=4, group_size=128, sym=True, desc_act=False)
    pack_gptq("gptq-int4-group64-desc-act", bits=4, group_size=64, sym=True, desc_act=True)
    pack_gptq("gptq-int4-channel", bits=4, group_size=-1, sym=True, desc_act=False)
    pack_gptq("gptq-int8-group128", bits=8, group_size=128, sym=True, desc_act=False)
    asymmetric: dict[str, Any] = {"bits": 4, "group_size": 32, "sym": False, "desc_act": False}
    pack_gptq("gptq-int4-group32-asymmetric", **asymmetric)
    pack_gptq("gptq-v2-int4-group32-asymmetric", **asymmetric, format="gptq_v2")
    pack_gptq("gptq-int4-group32-asymmetric-zeros", num_positive=3, **asymmetric)


def pack_gptq(folder: str, num_positive: int = 0, **options: Any) -> None:
    """The first group of ``num_positive`` outputs has no negative weight: its zero point is 0."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT, QuantizeConfig
    from gptqmodel.utils.model import (
        convert_gptq_v1_to_v2_format_module,
        convert_gptq_v2_to_v1_format_module,
    )

    config = QuantizeConfig(**options, offload_to_disk=False)
    num_inputs = 256 if config.group_size in (-1, 64, 128) else 128
    shapes = {"q_proj": (24, num_inputs), "k_proj": (8, num_inputs)}
    is_v1 = config.format == FORMAT.GPTQ
    tensors: dict[str, Tensor] = {}
    expected = {}
    for name, linear in linears_of(make_model(shapes, torch.float32), shapes).items():
        linear.weight[:num_positive, :32] = linear.weight[:num_positive, :32].abs()
        groups = groups_of_inputs(config, num_inputs)
        packed, read = (
            TorchLinear(
                bits=config.bits,
                group_size=config.group_size,
                sym=config.sym,
                desc_act=config.desc_act,
                in_features=linear.in_features,
                out_features=linear.out_features,
                bias=False,
            ).eval()
            for _ in range(2)
        )
        packed.pack_original(linear, *gptq_grid(linear.weight, groups, config), groups)
        if is_v1:
            convert_gptq_v2_to_v1_format_module(packed, config)
        tensors |= {f"{name}.{key}": tensor for key, tensor in packed.state_dict().items()}

        read.load_state_dict(packed.state_dict())
        if is_v1:
            convert_gptq_v1_to_v2_format_module(read, config.bits, config.pack_dtype)
        official = read.dequantize_weight().T
        read.scales = read.scales.float()
        expected[name] = read.dequantize_weight().T
        check_near(expected[name], official)
    save(folder, tensors, expected, config.to_dict())


def groups_of_inputs(config: Any, num_inputs: int) -> Tensor:
    """With ``desc_act`` the inputs are grouped in the order of their activations, here any
    order."""
    size = num_inputs if config.group_size == -1 else config.group_size
    order = torch.arange(num_inputs)
    if config.desc_act:
        order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(1))
    return (order // size).int()


def gptq_grid(weight: Tensor, groups: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each output and group."""
    from gptqmodel.quantization.quantizer import Quantizer

    quantizer = Quantizer(config)
    quantizer.configure(perchannel=True)
    scales, zeros = [], []
    for group in groups.unique():
        quantizer.find_params(weight[:, groups == group], weight=True)
        scales.append(quantizer.scale)
        zeros.append(quantizer.zero)
    return torch.cat(scales, 1), torch.cat(zeros, 1)


def awq() -> None:
    pack_awq("awq-int4-group128", 128, {"q_proj": (32, 256)})
    pack_awq("awq-int4-group64", 64, {"q_proj": (32, 128), "k_proj": (32, 128)})


def pack_awq(folder: str, group_size: int, shapes: Shapes) -> None:
    skip_init("awq")
    from awq.models._config import AwqConfig
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.quantize.quantizer import AwqQuantizer
    from awq.utils.packing_utils import dequantize_gemm

    config = AwqConfig(q_group_size=group_size)
    quantizer = SimpleNamespace(group_size=group_size, w_bit=config.w_bit, zero_point=True)
    tensors: dict[str, Tensor] = {}
    expected = {}
    for name, linear in linears_of(make_model(shapes, torch.float16), shapes).items():
        weight, scales, zeros = AwqQuantizer.pseudo_quantize_tensor(quantizer, linear.weight)
        linear.weight.data = weight  # the packer expects it rounded to the grid
        packed = WQLinear_GEMM.from_linear(
            linear,
            config.w_bit,
            group_size,
            scales=scales.t().contiguous(),
            zeros=zeros.t().contiguous(),
        )
        codes = packed.qweight, packed.qzeros
        official = dequantize_gemm(*codes, packed.scales, config.w_bit, group_size).T
        scales = packed.scales.float()
        expected[name] = dequantize_gemm(*codes, scales, config.w_bit, group_size).T
        check_near(expected[name], official)
        check_near(expected[name], weight)
        tensors |= {f"{name}.{key}": tensor for key, tensor in packed.state_dict().items()}
    save(folder, tensors, expected, config.to_transformers_dict())


def fp8() -> None:
    from transformers.integrations.finegrained_fp8 import FP8Linear
    from transformers.utils.quantization_config import FineGrainedFP8Config

    quantize_in_blocks("fp8-block", {"q_proj": (136, 144)})
    thin = {"q_proj": (136, 40), "k_proj": (8, 168)}
    quantize_in_blocks("fp8-block-ue8m0", thin, scale_fmt="ue8m0")

    config = FineGrainedFP8Config(activation_scheme="static", weight_block_size=None)
    shapes = {"q_proj": (20, 128), "k_proj": (12, 128)}
    tensors: dict[str, Tensor] = {}
    expected = {}
    for name, linear in linears_of(make_model(shapes, torch.bfloat16), shapes).items():
        weight, scale = quantize_fp8(linear.weight, config)
        layer = FP8Linear(linear.in_features, linear.out_features, activation_scheme="static")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.weight_scale_inv.data.fill_(scale.item())
        layer.activation_scale.data.fill_(0.02)
        tensors |= {f"{name}.{key}": tensor for key, tensor in layer.state_dict().items()}
        expected[name] = dequantize_fp8(layer.weight, layer.weight_scale_inv)
    save("fp8-tensor-scale-inv", tensors, expected, config.to_dict())


def quantize_in_blocks(folder: str, shapes: Shapes, **options: Any) -> None:
    from transformers.utils.quantization_config import FineGrainedFP8Config

    config = FineGrainedFP8Config(**options)
    tensors, expected = {}, {}
    for name, linear in linears_of(make_model(shapes, torch.bfloat16), shapes).items():
        weight, scale = quantize_fp8(linear.weight, config)
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = weight, scale
        expected[name] = dequantize_fp8(weight, scale, list(config.weight_block_size))
    save(folder, tensors, expected, config.to_dict())


def quantize_fp8(weight: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Pads the last blocks with zeros during quantization: transformers needs whole blocks."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    num_outputs, num_inputs = weight.shape
    height, width = config.weight_block_size or weight.shape
    padded = nn.functional.pad(weight, (0, -num_inputs % width, 0, -num_outputs % height))
    quantizer: Any = Fp8Quantize(SimpleNamespace(quantization_config=config))
    quantized = quantizer.convert({"weight": padded})
    return quantized["weight"][:num_outputs, :num_inputs], quantized["weight_scale_inv"]


def dequantize_fp8(weight: Tensor, scale: Tensor, block_size: list[int] | None = None) -> Tensor:
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    return _dequantize_fp8_weight(weight.data, scale.data, block_size, torch.float32)


def autofp8() -> None:
    skip_init("auto_fp8")
    from auto_fp8.config import BaseQuantizeConfig
    from auto_fp8.quantize import FP8StaticLinear, per_tensor_quantize

    config = BaseQuantizeConfig(activation_scheme="static")
    shapes = {"q_proj": (20, 128), "k_proj": (12, 128)}
    tensors: dict[str, Tensor] = {}
    expected = {}
    for name, linear in linears_of(make_model(shapes, torch.bfloat16), shapes).items():
        weight, scale = per_tensor_quantize(linear.weight)
        parameters = (
            nn.Parameter(tensor, requires_grad=False)
            for tensor in (weight, scale, torch.tensor(0.02))
        )
        names = ("weight", "weight_scale", "input_scale")
        layer = FP8StaticLinear(bias=None, **dict(zip(names, parameters, strict=True)))
        tensors |= {f"{name}.{key}": tensor for key, tensor in layer.state_dict().items()}
        expected[name] = dequantize_fp8(weight, scale)
    written = {
        "quant_method": config.quant_method,
        "activation_scheme": config.activation_scheme,
        "ignored_layers": ["lm_head"],
    }
    save("fp8-tensor", tensors, expected, written)


def mxfp4() -> None:
    from compressed_tensors import CompressionFormat
    from compressed_tensors.compressors import MXFP4PackedCompressor
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    from transformers.utils.quantization_config import Mxfp4Config

    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    scheme.format = CompressionFormat.mxfp4_pack_quantized
    num_experts, hidden, width = 2, 64, 32
    shapes = {
        "gate_up_proj": (num_experts * 2 * width, hidden),
        "down_proj": (num_experts * hidden, width),
    }
    tensors, expected = {}, {}
    for name, linear in linears_of(make_model(shapes, torch.bfloat16), shapes).items():
        scale, _ = calculate_qparams(*ranges_of(linear.weight, scheme.weights), scheme.weights)
        packed = MXFP4PackedCompressor.compress(
            {"weight": linear.weight, "weight_scale": scale}, scheme
        )
        experts = name.replace("self_attn", "mlp.experts")
        blocks = packed["weight_packed"].view(num_experts, -1, linear.in_features // 32, 16)
        scales = packed["weight_scale"].view(blocks.shape[:3])
        tensors[f"{experts}_blocks"], tensors[f"{experts}_scales"] = blocks, scales
        weight = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
        assert torch.equal(weight.flatten(0, 1), decompress(packed, scheme))
        expected[experts] = weight
    save("mxfp4-experts", tensors, expected, Mxfp4Config().to_dict())


def bitsandbytes() -> None:
    short = {"q_proj": (20, 128), "k_proj": (12, 128)}
    pack_bitsandbytes("bitsandbytes-nf4", "nf4", short)
    pack_bitsandbytes("bitsandbytes-nf4-double", "nf4", {"q_proj": (136, 128)}, double=True)
    pack_bitsandbytes("bitsandbytes-nf4-across-rows", "nf4", {"q_proj": (20, 72)})
    pack_bitsandbytes("bitsandbytes-fp4", "fp4", short)
    pack_bitsandbytes_int8("bitsandbytes-int8", short)


def pack_bitsandbytes(folder: str, kind: str, shapes: Shapes, double: bool = False) -> None:
    from bitsandbytes.functional import QuantState, dequantize_4bit
    from bitsandbytes.nn import Linear4bit, Params4bit
    from transformers.utils.quantization_config import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    tensors: dict[str, Tensor] = {}
    expected = {}
    for name, linear in linears_of(make_model(shapes, torch.bfloat16), shapes).items():
        options = {"quant_type": kind, "compress_statistics": double}
        packed = Linear4bit(linear.in_features, linear.out_features, bias=False, **options)
        packed.weight = Params4bit(linear.weight.data, requires_grad=False, **options)
        saved = packed.to("cpu").state_dict()
        tensors |= {f"{name}.{key}": tensor for key, tensor in saved.items()}

        codes = saved.pop("weight")
        state = QuantState.from_dict(saved, codes.device)
        official = dequantize_4bit(codes, state)
        state.dtype = torch.float32
        expected[name] = dequantize_4bit(codes, state)
        check_near(expected[name], official)
    save(folder, tensors, expected, config.to_dict())


def pack_bitsandbytes_int8(folder: str, shapes: Shapes) -> None:
    from bitsandbytes.functional import int8_vectorwise_dequant
    from bitsandbytes.nn import Int8Params, Linear8bitLt
    from transformers.utils.quantization_config import BitsAndBytesConfig

    tensors: dict[str, Tensor] = {}
    expected = {}
    for name, linear in linears_of(make_model(shapes, torch.float16), shapes).items():
        packed = Linear8bitLt(
            linear.in_features, linear.out_features, bias=False, has_fp16_weights=False
        )
        packed.weight = Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
        saved = packed.to("cpu").state_dict()
        tensors |= {f"{name}.{key}": tensor for key, tensor in saved.items()}
        expected[name] = int8_vectorwise_dequant(saved["weight"], saved["SCB"])
    save(folder, tensors, expected, BitsAndBytesConfig(load_in_8bit=True).to_dict())


def modelopt() -> None:
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor

    def fp8(weight: Tensor, **blocks: Any) -> tuple[dict[str, Tensor], Tensor]:
        codes, scale = FP8QTensor.quantize(weight.float(), **blocks)
        block_sizes = blocks.get("block_sizes")
        expected = codes.dequantize(torch.float32, scale=scale, block_sizes=block_sizes)
        if block_sizes is not None:
            scale = scale[:, None, :, None]
        return {"weight": codes._quantized_data, "weight_scale": scale.squeeze(-1)}, expected

    def tensor(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tensors, expected = fp8(weight)
        return tensors | {"input_scale": torch.tensor(0.02)}, expected

    def block(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tensors, expected = fp8(weight, block_sizes={-1: 128, -2: 128})
        return tensors | {"weight_scale": tensors["weight_scale"][..., None]}, expected

    def mx(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scale = MXFP8QTensor.quantize(weight)
        tensors = {"weight": codes._quantized_data, "weight_scale": scale}
        return tensors, codes.dequantize(torch.float32, scale=scale)

    def nv(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scale, factor = NVFP4QTensor.quantize(weight, 16)
        expected = codes.dequantize(
            torch.float32, scale=scale, double_scale=factor, block_sizes={-1: 16}
        )
        tensors = {"weight": codes._quantized_data, "weight_scale": scale}
        return tensors | {"weight_scale_2": factor, "input_scale": torch.tensor(0.02)}, expected

    short = {"q_proj": (20, 128), "k_proj": (12, 128)}
    pack_modelopt("modelopt-fp8-tensor", "FP8", short, tensor)
    channel = partial(fp8, axis=0)
    pack_modelopt("modelopt-fp8-channel", "FP8_PER_CHANNEL_PER_TOKEN", short, channel)
    pack_modelopt("modelopt-fp8-block", "FP8_PB_WO", {"q_proj": (136, 144)}, block)
    pack_modelopt("modelopt-mxfp8", "MXFP8", short, mx)
    pack_modelopt("modelopt-nvfp4", "NVFP4", short, nv)


def pack_modelopt(
    folder: str,
    algo: str,
    shapes: Shapes,
    quantize: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]],
) -> None:
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

    values = {"quant_algo": algo, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    tensors: dict[str, Tensor] = {}
    expected = {}
    for name, linear in linears_of(make_model(shapes, torch.bfloat16), shapes).items():
        written, expected[name] = quantize(linear.weight.data)
        tensors |= {f"{name}.{key}": tensor for key, tensor in written.items()}
    save(folder, tensors, expected, convert_hf_quant_config_format({"quantization": values}))


def quark() -> None:
    from quark.torch.quantization.config import config

    static = {"is_dynamic": False, "ch_axis": 0}
    rounded = {"symmetric": True, "scale_type": "float", "round_method": "half_even"}
    pack_quark("quark-fp8-tensor", config.FP8E4M3PerTensorSpec("min_max", is_dynamic=False))
    pack_quark("quark-fp8-channel", config.FP8E4M3PerChannelSpec(**static))
    pack_quark("quark-int8-channel", config.Int8PerChannelSpec(**rounded, **static))
    pack_quark("quark-mxfp4", config.OCP_MXFP4Spec(is_dynamic=False, ch_axis=-1))


def pack_quark(folder: str, kind: Any) -> None:
    from quark.torch.export.nn.modules.realquantizer import get_real_quantizer
    from quark.torch.quantization.tensor_quantize import FakeQuantizeBase

    cpu, spec = torch.device("cpu"), kind.to_quantization_spec()
    shapes = {"q_proj": (20, 128), "k_proj": (12, 128)}
    tensors: dict[str, Tensor] = {}
    expected = {}
    for name, linear in linears_of(make_model(shapes, torch.bfloat16), shapes).items():
        weight = linear.weight.data.float()
        observer = FakeQuantizeBase.get_fake_quantize(spec, cpu)
        observer.enable_observer()
        rounded = observer(weight)
        quantizer = get_real_quantizer(
            spec,
            observer,
            reorder=True,
            real_quantized=False,
            float_dtype=torch.float32,
            device=cpu,
        )
        codes = quantizer.to_real_quantize_params(weight)
        quantizer.maybe_convert_and_transpose_scale()
        quantizer.pack_zero_point()
        quantizer.real_quantized = True
        expected[name] = quantizer(codes)
        assert torch.equal(expected[name], rounded)
        written = {f"weight_{key}": tensor for key, tensor in quantizer.state_dict().items()}
        tensors |= {f"{name}.{key}": each for key, each in (written | {"weight": codes}).items()}
    written_config = {
        "quant_method": "quark",
        "global_quant_config": {"weight": spec.to_dict(), "input_tensors": None},
        "layer_quant_config": {},
        "exclude": ["lm_head"],
        "export": {"weight_format": "real_quantized", "pack_method": "reorder"},
    }
    save(folder, tensors, expected, written_config)


def skip_init(package: str) -> None:
    """Imports its modules without the imports of ``package`` itself, since some are missing."""
    if package not in sys.modules:
        stand_in = ModuleType(package)
        stand_in.__path__ = find_spec(package).submodule_search_locations
        sys.modules[package] = stand_in


PARTS: dict[str, Callable[[], None]] = {
    "compressed-tensors": compressed_tensors,
    "compressed-tensors-g-idx": compressed_tensors_g_idx,
    "compressed-tensors-mxfp8": compressed_tensors_mxfp8,
    "gptq": gptq,
    "awq": awq,
    "fp8": fp8,
    "autofp8": autofp8,
    "mxfp4": mxfp4,
    "bitsandbytes": bitsandbytes,
    "modelopt": modelopt,
    "quark": quark,
}

if __name__ == "__main__":
    for part in sys.argv[1:]:
        PARTS[part]()
