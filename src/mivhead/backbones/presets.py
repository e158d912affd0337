"""The named backbones as data: presets, architectures, and where the weights come from.

This is the place to change after a measurement. Plain data: importing it imports no PyTorch.

`PRESETS` holds the default backbone and its larger variants, which
`mivhead.backbones.efficientnet_lite` builds. `PAPER` holds the backbones of the paper, which
`mivhead.backbones.timm_models` builds. `NAMED` holds short names of the models of timm and
OpenCLIP that many users know; their taps and settings follow from the architecture by the rules of
those adapters. `FACTS` holds what `miv backbones list` shows of all of them. Taps are listed
shallow to deep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mivhead.backbones.preset import BlockPreset, Preprocessing, Preset

# Measured: docs/research-log.md. Pooled candidates in addition to the native maps did not help.
_EFFICIENTNET_LITE0 = Preset(
    # Outputs of the last three stages, 112x14x14, 192x7x7 and 320x7x7, and the activated map after
    # the last convolution, 1280x7x7, whose average is also the feature of the plain experts.
    taps=("blocks.4", "blocks.5", "blocks.6", "bn2"),
    blocks=(BlockPreset(), BlockPreset(), BlockPreset(), BlockPreset(plain=True)),
    preprocessing=Preprocessing(size=224, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
)
_ITS_CLASSIFIER = BlockPreset(plain=True, classifier="efficientnet_lite0")


def _at_size(preset: Preset, size: int) -> Preset:
    return replace(preset, preprocessing=replace(preset.preprocessing, size=size))


PRESETS = {
    "efficientnet_lite0": replace(
        _EFFICIENTNET_LITE0, blocks=(*_EFFICIENTNET_LITE0.blocks[:-1], _ITS_CLASSIFIER)
    ),
    "efficientnet_lite1": _at_size(_EFFICIENTNET_LITE0, 240),
    "efficientnet_lite2": _at_size(_EFFICIENTNET_LITE0, 260),
}


@dataclass(frozen=True)
class PaperBackbone:
    """A backbone of the paper."""

    model: str  # name of the architecture in timm; with a tag if the weights are on timm's hub
    # Its settings. `pool_sizes` are the paper's lists; `native` says whether the map itself is
    # among them.
    preset: Preset
    origin: str  # where the weights come from, for users who have to download them
    # Whether the final norm is applied to every returned block of a ViT (not to CLIP's)
    normed: bool = True
    files: tuple[str, ...] = ()  # names under which its authors publish the checkpoint
    # Data sets on which the paper's authors lowered the augmentation threshold, for lack of memory,
    # and the threshold there (their published code states them)
    lowered: Mapping[str, int] = field(default_factory=dict)

    @property
    def on_hub(self) -> bool:
        """Whether the weights are on timm's hub."""
        return "." in self.model


def _cnn(*pool_sizes: tuple[int, ...], heads: tuple[int, ...] = ()) -> tuple[BlockPreset, ...]:
    counts = heads or (None,) * len(pool_sizes)
    return tuple(BlockPreset(s, heads=h) for s, h in zip(pool_sizes, counts, strict=True))


def _vit(*pool_sizes: tuple[int, ...], heads: tuple[int, ...] = ()) -> tuple[BlockPreset, ...]:
    blocks = _cnn(*pool_sizes, heads=heads)
    return tuple(replace(block, native=False, form="vit", tau=200.0) for block in blocks)


def _last_blocks(depth: int, count: int) -> tuple[str, ...]:
    return tuple(f"blocks.{i}" for i in range(depth - count, depth))


_TV = "torchvision"
_DINO = "github.com/facebookresearch/dino"
_DEIT = "github.com/facebookresearch/deit (without distillation)"
_SMALL = Preprocessing(size=84)

# Sets whose tasks have many images; the authors lowered T for them, mostly by 5.
_LARGE = ("quickdraw", "fungi", "mscoco", "ChestX", "cifar100", "Food101")
_LOWER_RESNET = dict.fromkeys(("quickdraw", "ChestX", "cifar100"), 10)
_LOWER_SEVEN = dict.fromkeys((*_LARGE, "traffic_sign"), 15)

_RESNET = Preset(("layer3", "layer4"), _cnn((13, 11, 9, 8), (6, 5, 4)), threshold=15)
# For the paper's ablation of the number of blocks. The paper does not state the pool sizes of the
# third block: here they are twice those of the next one, whose map is half as wide.
_RESNET_3 = Preset(
    ("layer2", "layer3", "layer4"), _cnn((26, 22, 18, 16), (13, 11, 9, 8), (6, 5, 4)), threshold=15
)
_VIT_S16 = Preset(_last_blocks(12, 4), _vit((13, 10), (7,), (), ()), threshold=20)
_VIT_S8 = Preset(_last_blocks(12, 4), _vit((24, 20, 16), (12, 8), (), ()), threshold=15)
_VIT_B16 = Preset(_last_blocks(12, 2), _vit((14, 10, 7), ()), threshold=30)

PAPER = {
    "resnet50": PaperBackbone(
        "resnet50.tv2_in1k",
        _RESNET,
        f"{_TV} ResNet-50 IMAGENET1K_V2",
        files=("resnet50-11ad3fa6.pth",),
        lowered=_LOWER_RESNET,
    ),
    "resnet50_3blocks": PaperBackbone(
        "resnet50.tv2_in1k",
        _RESNET_3,
        f"{_TV} ResNet-50 IMAGENET1K_V2",
        files=("resnet50-11ad3fa6.pth",),
        lowered=_LOWER_RESNET,
    ),
    "dino_resnet50": PaperBackbone(
        "resnet50",
        _RESNET,
        f"dino_resnet50_pretrain.pth of {_DINO}",
        files=("dino_resnet50_pretrain.pth",),
        lowered=_LOWER_RESNET,
    ),
    "resnet34": PaperBackbone(
        "resnet34.tv_in1k",
        replace(_RESNET, threshold=30),
        f"{_TV} ResNet-34 IMAGENET1K_V1",
        files=("resnet34-b627a593.pth",),
    ),
    "resnet18": PaperBackbone(
        "resnet18.tv_in1k",
        Preset(
            ("layer2", "layer3", "layer4"), _cnn((10, 9, 8, 7), (5, 4), ()), _SMALL, threshold=30
        ),
        f"{_TV} ResNet-18 IMAGENET1K_V1",
        files=("resnet18-f37072fd.pth",),
    ),
    "sdl_resnet18": PaperBackbone(
        "resnet18",
        Preset(("layer3", "layer4"), _cnn((10, 9, 8, 7), (5, 4, 3)), _SMALL, threshold=30),
        "model_best.pth.tar of the ImageNet model (SDL) of github.com/VICO-UoE/URL",
        files=("model_best.pth.tar",),
    ),
    "deit_small": PaperBackbone(
        "deit_small_patch16_224.fb_in1k",
        _VIT_S16,
        f"deit_small_patch16_224-cd65a155.pth of {_DEIT}",
        files=("deit_small_patch16_224-cd65a155.pth",),
    ),
    "dino_vits16": PaperBackbone(
        "vit_small_patch16_224.dino",
        _VIT_S16,
        f"dino_deitsmall16_pretrain.pth of {_DINO}",
        files=("dino_deitsmall16_pretrain.pth",),
        lowered=dict.fromkeys(_LARGE, 15),
    ),
    "dino_vits8": PaperBackbone(
        "vit_small_patch8_224.dino",
        _VIT_S8,
        f"dino_deitsmall8_pretrain.pth of {_DINO}",
        files=("dino_deitsmall8_pretrain.pth",),
        lowered=dict.fromkeys(_LARGE, 10) | {"quickdraw": 5, "Food101": 5, "cifar100": 2},
    ),
    "deit_base": PaperBackbone(
        "deit_base_patch16_224.fb_in1k",
        _VIT_B16,
        f"deit_base_patch16_224-b5f2ef4d.pth of {_DEIT}",
        files=("deit_base_patch16_224-b5f2ef4d.pth",),
        lowered={"quickdraw": 25},
    ),
    "dino_vitb16": PaperBackbone(
        "vit_base_patch16_224.dino",
        _VIT_B16,
        f"dino_vitbase16_pretrain.pth of {_DINO}",
        files=("dino_vitbase16_pretrain.pth",),
        lowered={"quickdraw": 25},
    ),
    "densenet161": PaperBackbone(
        "densenet161.tv_in1k",
        Preset(("features.denseblock3", "features.norm5"), _cnn((11, 9), (5,), heads=(32, 32))),
        "timm densenet161.tv_in1k",
        lowered=dict.fromkeys(("quickdraw", "fungi", "ChestX", "cifar100"), 10),
    ),
    "regnety_016": PaperBackbone(
        "regnety_016.tv2_in1k",
        Preset(("s3", "s4"), _cnn((13, 11, 9, 8), (6, 5, 4), heads=(8, 24)), threshold=20),
        "timm regnety_016.tv2_in1k",
        lowered=dict.fromkeys(("ChestX", "cifar100"), 15),
    ),
    "swin_base_simmim": PaperBackbone(
        "swin_base_patch4_window7_224",
        # The output of stage 3 after patch merging, and the normed last block: both 1024x7x7.
        Preset(("layers.3.downsample", "norm"), _vit((7,), (4,), heads=(16, 32)), threshold=20),
        "simmim_finetune__swin_base__img224_window7__800ep.pth of github.com/microsoft/SimMIM",
        files=("simmim_finetune__swin_base__img224_window7__800ep.pth",),
        lowered=_LOWER_SEVEN,
    ),
    "clip_vitl14": PaperBackbone(
        "vit_large_patch14_clip_quickgelu_224.openai",
        # Other heads use [CLS] after the final norm, which the blocks do not have.
        Preset(
            (*_last_blocks(24, 2), "pooled"),
            (*_vit((15, 11), (7,)), BlockPreset(form="vit", tau=200.0, pooled=True)),
            threshold=20,
        ),
        "huggingface.co/openai/clip-vit-large-patch14",
        normed=False,
        lowered=_LOWER_SEVEN,
    ),
}

# Names that users know. The registries of timm and OpenCLIP hold input size, mean and standard
# deviation, so they are not repeated here.

NAMED = {
    "dinov2_small": "timm:vit_small_patch14_dinov2.lvd142m",
    "dinov2_small_reg": "timm:vit_small_patch14_reg4_dinov2.lvd142m",
    "dinov2_base": "timm:vit_base_patch14_dinov2.lvd142m",
    "dinov2_base_reg": "timm:vit_base_patch14_reg4_dinov2.lvd142m",
    "dinov2_large": "timm:vit_large_patch14_dinov2.lvd142m",
    "dinov2_large_reg": "timm:vit_large_patch14_reg4_dinov2.lvd142m",
    "dinov3_small": "timm:vit_small_patch16_dinov3.lvd1689m",
    "dinov3_small_plus": "timm:vit_small_plus_patch16_dinov3.lvd1689m",
    "dinov3_base": "timm:vit_base_patch16_dinov3.lvd1689m",
    "dinov3_large": "timm:vit_large_patch16_dinov3.lvd1689m",
    "dinov3_convnext_tiny": "timm:convnext_tiny.dinov3_lvd1689m",
    "dinov3_convnext_small": "timm:convnext_small.dinov3_lvd1689m",
    "dinov3_convnext_base": "timm:convnext_base.dinov3_lvd1689m",
    "convnextv2_nano": "timm:convnextv2_nano.fcmae_ft_in22k_in1k",
    "convnextv2_tiny": "timm:convnextv2_tiny.fcmae_ft_in22k_in1k",
    "convnextv2_base": "timm:convnextv2_base.fcmae_ft_in22k_in1k",
    "eva02_small": "timm:eva02_small_patch14_336.mim_in22k_ft_in1k",
    "eva02_base": "timm:eva02_base_patch14_448.mim_in22k_ft_in22k_in1k",
    "eva02_large": "timm:eva02_large_patch14_448.mim_m38m_ft_in22k_in1k",
    "mobilenetv4_small": "timm:mobilenetv4_conv_small.e2400_r224_in1k",
    "mobilenetv4_medium": "timm:mobilenetv4_conv_medium.e500_r256_in1k",
    "mobilenetv4_hybrid": "timm:mobilenetv4_hybrid_medium.e200_r256_in12k_ft_in1k",
    "fastvit_t8": "timm:fastvit_t8.apple_in1k",
    "fastvit_sa12": "timm:fastvit_sa12.apple_in1k",
    # With a text tower: OpenCLIP's architecture and weights, or a model of the hub.
    "clip_vitb32": "open_clip:ViT-B-32-quickgelu/openai",
    "clip_vitb16": "open_clip:ViT-B-16-quickgelu/openai",
    "openclip_vitb32": "open_clip:ViT-B-32/laion2b_s34b_b79k",
    "openclip_vitb16": "open_clip:ViT-B-16/laion2b_s34b_b88k",
    "openclip_vitl14": "open_clip:ViT-L-14/laion2b_s32b_b82k",
    "siglip2_base": "open_clip:ViT-B-16-SigLIP2/webli",
    "siglip2_large": "open_clip:ViT-L-16-SigLIP2-256/webli",
    "siglip2_so400m": "open_clip:ViT-SO400M-14-SigLIP2/webli",
    "pe_core_tiny": "open_clip:PE-Core-T-16-384/meta",
    "pe_core_small": "open_clip:PE-Core-S-16-384/meta",
    "pe_core_base": "open_clip:PE-Core-B-16/meta",
    "pe_core_large": "open_clip:PE-Core-L-14-336/meta",
    "mobileclip2_s0": "open_clip:MobileCLIP2-S0/dfndr2b",
    "mobileclip2_s2": "open_clip:MobileCLIP2-S2/dfndr2b",
    "mobileclip2_b": "open_clip:MobileCLIP2-B/dfndr2b",
    "bioclip2": "open_clip:imageomics/bioclip-2",
}


@dataclass(frozen=True)
class Facts:
    """What a user wants to know before choosing a backbone."""

    year: int  # of its publication
    megabytes: int  # of its weights, in float32
    licence: str  # of its weights, as in timm's registry


_APACHE, _BSD, _MIT = "apache-2.0", "bsd-3-clause", "mit"
_DINOV3, _CC_NC, _FASTVIT, _APPLE = (
    "dinov3-license",
    "cc-by-nc-4.0",
    "fastvit-license",
    "apple-amlr",
)

FACTS = {
    "efficientnet_lite0": Facts(2020, 19, _APACHE),
    "efficientnet_lite1": Facts(2020, 22, _APACHE),
    "efficientnet_lite2": Facts(2020, 25, _APACHE),
    "dinov2_small": Facts(2023, 88, _APACHE),
    "dinov2_small_reg": Facts(2023, 88, _APACHE),
    "dinov2_base": Facts(2023, 346, _APACHE),
    "dinov2_base_reg": Facts(2023, 346, _APACHE),
    "dinov2_large": Facts(2023, 1217, _APACHE),
    "dinov2_large_reg": Facts(2023, 1217, _APACHE),
    "dinov3_small": Facts(2025, 86, _DINOV3),
    "dinov3_small_plus": Facts(2025, 115, _DINOV3),
    "dinov3_base": Facts(2025, 343, _DINOV3),
    "dinov3_large": Facts(2025, 1212, _DINOV3),
    "dinov3_convnext_tiny": Facts(2025, 111, _DINOV3),
    "dinov3_convnext_small": Facts(2025, 198, _DINOV3),
    "dinov3_convnext_base": Facts(2025, 350, _DINOV3),
    "convnextv2_nano": Facts(2023, 62, _CC_NC),
    "convnextv2_tiny": Facts(2023, 115, _CC_NC),
    "convnextv2_base": Facts(2023, 355, _CC_NC),
    "eva02_small": Facts(2023, 89, _MIT),
    "eva02_base": Facts(2023, 348, _MIT),
    "eva02_large": Facts(2023, 1220, _MIT),
    "mobilenetv4_small": Facts(2024, 15, _APACHE),
    "mobilenetv4_medium": Facts(2024, 39, _APACHE),
    "mobilenetv4_hybrid": Facts(2024, 45, _APACHE),
    "fastvit_t8": Facts(2023, 16, _FASTVIT),
    "fastvit_sa12": Facts(2023, 46, _FASTVIT),
    "clip_vitb32": Facts(2021, 605, _APACHE),
    "clip_vitb16": Facts(2021, 598, _APACHE),
    "openclip_vitb32": Facts(2022, 605, _APACHE),
    "openclip_vitb16": Facts(2023, 598, _APACHE),
    "openclip_vitl14": Facts(2022, 1710, _APACHE),
    "siglip2_base": Facts(2025, 1501, _APACHE),
    "siglip2_large": Facts(2025, 3526, _APACHE),
    "siglip2_so400m": Facts(2025, 4542, _APACHE),
    "pe_core_tiny": Facts(2025, 278, _APACHE),
    "pe_core_small": Facts(2025, 349, _APACHE),
    "pe_core_base": Facts(2025, 1791, _APACHE),
    "pe_core_large": Facts(2025, 2685, _APACHE),
    "mobileclip2_s0": Facts(2025, 300, _APPLE),
    "mobileclip2_s2": Facts(2025, 397, _APPLE),
    "mobileclip2_b": Facts(2025, 599, _APPLE),
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
