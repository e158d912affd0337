"""The named backbones as data: presets, architectures, and where the weights come from.

`PRESETS` holds the default backbone and its larger variants (`efficientnet_lite`), `PAPER` the
backbones of the paper (`timm_models`), `NAMED` short names of models of timm and OpenCLIP, whose
settings follow from the architecture, and `FACTS` what `miv backbones list` shows of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mivhead.backbones.preset import VECTOR, BlockPreset, Preprocessing, Preset, as_vit

# Measured: docs/research-log.md. Pooled candidates in addition to the native maps did not help.
_EFFICIENTNET_LITE0 = Preset(
    # Outputs of the last three stages, 112x14x14, 192x7x7 and 320x7x7, and the activated map after
    # the last convolution, 1280x7x7, whose average is also the feature of the plain experts.
    taps=("blocks.4", "blocks.5", "blocks.6", "bn2"),
    blocks=(BlockPreset(), BlockPreset(), BlockPreset(), BlockPreset(plain=True)),
    preprocessing=Preprocessing(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
)


PRESETS = {
    f"efficientnet_lite{i}": replace(
        _EFFICIENTNET_LITE0, preprocessing=replace(_EFFICIENTNET_LITE0.preprocessing, size=size)
    )
    for i, size in enumerate((224, 240, 260))
}


@dataclass(frozen=True)
class PaperBackbone:
    """A backbone of the paper."""

    model: str  # name of the architecture in timm; with a tag if the weights are on timm's hub
    preset: Preset  # with the paper's `pool_sizes`; `native`: whether the map is one of them
    origin: str = ""  # where to get weights that are not on the hub
    normed: bool = True  # whether the final norm is applied to every returned block of a ViT

    @property
    def on_hub(self) -> bool:
        """Whether the weights are on timm's hub."""
        return "." in self.model


def _cnn(*pool_sizes: tuple[int, ...], heads: tuple[int, ...] = ()) -> tuple[BlockPreset, ...]:
    counts = heads or (None,) * len(pool_sizes)
    return tuple(BlockPreset(s, heads=h) for s, h in zip(pool_sizes, counts, strict=True))


def _vit(*pool_sizes: tuple[int, ...], heads: tuple[int, ...] = ()) -> tuple[BlockPreset, ...]:
    return tuple(replace(b, native=False) for b in as_vit(_cnn(*pool_sizes, heads=heads)))


def _last_blocks(depth: int, count: int) -> tuple[str, ...]:
    return tuple(f"blocks.{i}" for i in range(depth - count, depth))


_SMALL = Preprocessing(size=84)

_LAYERS = ("layer2", "layer3", "layer4")
_RESNET = Preset(_LAYERS[1:], _cnn((13, 11, 9, 8), (6, 5, 4)), threshold=15)
# For the paper's ablation, which does not state the sizes of the third block: twice the next ones.
_RESNET_3 = Preset(_LAYERS, _cnn((26, 22, 18, 16), (13, 11, 9, 8), (6, 5, 4)), threshold=15)
_VIT_S16 = Preset(_last_blocks(12, 4), _vit((13, 10), (7,), (), ()), threshold=20)
_VIT_S8 = Preset(_last_blocks(12, 4), _vit((24, 20, 16), (12, 8), (), ()), threshold=15)
_VIT_B16 = Preset(_last_blocks(12, 2), _vit((14, 10, 7), ()), threshold=30)

PAPER = {
    "resnet50": PaperBackbone("resnet50.tv2_in1k", _RESNET),
    "resnet50_3blocks": PaperBackbone("resnet50.tv2_in1k", _RESNET_3),
    "dino_resnet50": PaperBackbone(
        "resnet50", _RESNET, "dino_resnet50_pretrain.pth of github.com/facebookresearch/dino"
    ),
    "resnet34": PaperBackbone("resnet34.tv_in1k", replace(_RESNET, threshold=30)),
    "resnet18": PaperBackbone(
        "resnet18.tv_in1k",
        Preset(_LAYERS, _cnn((10, 9, 8, 7), (5, 4), ()), _SMALL, threshold=30),
    ),
    "sdl_resnet18": PaperBackbone(
        "resnet18",
        Preset(_LAYERS[1:], _cnn((10, 9, 8, 7), (5, 4, 3)), _SMALL, threshold=30),
        "model_best.pth.tar of the ImageNet model (SDL) of github.com/VICO-UoE/URL",
    ),
    "deit_small": PaperBackbone("deit_small_patch16_224.fb_in1k", _VIT_S16),
    "dino_vits16": PaperBackbone("vit_small_patch16_224.dino", _VIT_S16),
    "dino_vits8": PaperBackbone("vit_small_patch8_224.dino", _VIT_S8),
    "deit_base": PaperBackbone("deit_base_patch16_224.fb_in1k", _VIT_B16),
    "dino_vitb16": PaperBackbone("vit_base_patch16_224.dino", _VIT_B16),
    "densenet161": PaperBackbone(
        "densenet161.tv_in1k",
        Preset(("features.denseblock3", "features.norm5"), _cnn((11, 9), (5,), heads=(32, 32))),
    ),
    "regnety_016": PaperBackbone(
        "regnety_016.tv2_in1k",
        Preset(("s3", "s4"), _cnn((13, 11, 9, 8), (6, 5, 4), heads=(8, 24)), threshold=20),
    ),
    "swin_base_simmim": PaperBackbone(
        "swin_base_patch4_window7_224",
        # The output of stage 3 after patch merging, and the normed last block: both 1024x7x7.
        Preset(("layers.3.downsample", "norm"), _vit((7,), (4,), heads=(16, 32)), threshold=20),
        "simmim_finetune__swin_base__img224_window7__800ep.pth of github.com/microsoft/SimMIM",
    ),
    "clip_vitl14": PaperBackbone(
        "vit_large_patch14_clip_quickgelu_224.openai",
        # Other heads use [CLS] after the final norm, which the blocks do not have.
        Preset((*_last_blocks(24, 2), "pooled"), (*_vit((15, 11), (7,)), VECTOR), threshold=20),
        normed=False,
    ),
}

# Names that users know; input size, mean and standard deviation are in the libraries' registries.
NAMED = {
    "dinov2_small": "timm:vit_small_patch14_dinov2.lvd142m",
    "dinov2_base": "timm:vit_base_patch14_dinov2.lvd142m",
    "dinov3_small": "timm:vit_small_patch16_dinov3.lvd1689m",
    "dinov3_base": "timm:vit_base_patch16_dinov3.lvd1689m",
    "dinov3_convnext_tiny": "timm:convnext_tiny.dinov3_lvd1689m",
    "convnextv2_tiny": "timm:convnextv2_tiny.fcmae_ft_in22k_in1k",
    # With a text tower: OpenCLIP's architecture and weights, or a model of the hub.
    "clip_vitb32": "open_clip:ViT-B-32-quickgelu/openai",
    "siglip2_base": "open_clip:ViT-B-16-SigLIP2/webli",
    "mobileclip2_s0": "open_clip:MobileCLIP2-S0/dfndr2b",
    "bioclip2": "open_clip:imageomics/bioclip-2",
}


@dataclass(frozen=True)
class Facts:
    """What a user wants to know before choosing a backbone."""

    year: int  # of its publication
    megabytes: int  # of its weights, in float32
    licence: str  # of its weights, as in timm's registry


_APACHE, _BSD, _MIT = "apache-2.0", "bsd-3-clause", "mit"
_DINOV3, _CC_NC, _APPLE = "dinov3-license", "cc-by-nc-4.0", "apple-amlr"

FACTS = {
    "efficientnet_lite0": Facts(2020, 19, _APACHE),
    "efficientnet_lite1": Facts(2020, 22, _APACHE),
    "efficientnet_lite2": Facts(2020, 25, _APACHE),
    "dinov2_small": Facts(2023, 88, _APACHE),
    "dinov2_base": Facts(2023, 346, _APACHE),
    "dinov3_small": Facts(2025, 86, _DINOV3),
    "dinov3_base": Facts(2025, 343, _DINOV3),
    "dinov3_convnext_tiny": Facts(2025, 111, _DINOV3),
    "convnextv2_tiny": Facts(2023, 115, _CC_NC),
    "clip_vitb32": Facts(2021, 605, _APACHE),
    "siglip2_base": Facts(2025, 1501, _APACHE),
    "mobileclip2_s0": Facts(2025, 300, _APPLE),
    "bioclip2": Facts(2025, 1710, _MIT),
    "resnet50": Facts(2022, 102, _BSD),
    "resnet50_3blocks": Facts(2022, 102, _BSD),
    "dino_resnet50": Facts(2021, 94, _APACHE),
    "resnet34": Facts(2015, 87, _BSD),
    "resnet18": Facts(2015, 47, _BSD),
    "sdl_resnet18": Facts(2021, 45, _MIT),
    "deit_small": Facts(2020, 88, _APACHE),
    "deit_base": Facts(2020, 346, _APACHE),
    "dino_vits16": Facts(2021, 87, _APACHE),
    "dino_vits8": Facts(2021, 87, _APACHE),
    "dino_vitb16": Facts(2021, 343, _APACHE),
    "densenet161": Facts(2017, 116, _APACHE),
    "regnety_016": Facts(2022, 45, _BSD),
    "swin_base_simmim": Facts(2021, 351, _MIT),
    "clip_vitl14": Facts(2021, 1216, _APACHE),
}
