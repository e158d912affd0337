"""The named backbones as data: presets, architectures, and where the weights come from.

This is the place to change after a measurement. Plain data: importing it imports no PyTorch.

`PRESETS` holds the default backbone and its larger variants, which
`mivhead.backbones.efficientnet_lite` builds. `PAPER` holds the backbones of the paper, which
`mivhead.backbones.timm_models` builds. Taps are listed shallow to deep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mivhead.backbones.preset import BlockPreset, Preprocessing, Preset

# Measured: docs/results/presets.md. Pooled candidates in addition to the native maps did not help.
_EFFICIENTNET_LITE0 = Preset(
    # Outputs of the last three stages, 112x14x14, 192x7x7 and 320x7x7, and the activated map after
    # the last convolution, 1280x7x7, whose average is also the feature of the plain experts.
    taps=("blocks.4", "blocks.5", "blocks.6", "bn2"),
    blocks=(BlockPreset(), BlockPreset(), BlockPreset(), BlockPreset(plain=True)),
    preprocessing=Preprocessing(size=224, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
)


def _at_size(preset: Preset, size: int) -> Preset:
    return replace(preset, preprocessing=replace(preset.preprocessing, size=size))


PRESETS = {
    "efficientnet_lite0": _EFFICIENTNET_LITE0,
    "efficientnet_lite1": _at_size(_EFFICIENTNET_LITE0, 240),
    "efficientnet_lite2": _at_size(_EFFICIENTNET_LITE0, 260),
}


@dataclass(frozen=True)
class PaperBackbone:
    """A backbone of the paper.

    Parameters
    ----------
    model : str
        Name of the architecture in timm; with a tag if the weights are on timm's hub.
    preset : Preset
        Its settings. `pool_sizes` are the paper's lists; `native` says whether the map itself is
        among them.
    origin : str
        Where the weights come from, for users who have to download them.
    normed : bool, default=True
        Whether the final norm is applied to every returned block of a ViT (not to CLIP's).
    files : tuple of str, default=()
        Names under which its authors publish the checkpoint.
    lowered : mapping of str to int, optional
        Data sets on which the paper's authors lowered the augmentation threshold, for lack of
        memory, and the threshold there (their published code states them).
    """

    model: str
    preset: Preset
    origin: str
    normed: bool = True
    files: tuple[str, ...] = ()
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
