"""What the paper's authors publish: names of their checkpoints, and where they lowered T."""

# Names under which the checkpoints of backbones are published
CHECKPOINTS = {
    "resnet50": "resnet50-11ad3fa6.pth",
    "resnet50_3blocks": "resnet50-11ad3fa6.pth",
    "dino_resnet50": "dino_resnet50_pretrain.pth",
    "resnet34": "resnet34-b627a593.pth",
    "resnet18": "resnet18-f37072fd.pth",
    "sdl_resnet18": "model_best.pth.tar",
    "deit_small": "deit_small_patch16_224-cd65a155.pth",
    "dino_vits16": "dino_deitsmall16_pretrain.pth",
    "dino_vits8": "dino_deitsmall8_pretrain.pth",
    "deit_base": "deit_base_patch16_224-b5f2ef4d.pth",
    "dino_vitb16": "dino_vitbase16_pretrain.pth",
    "swin_base_simmim": "simmim_finetune__swin_base__img224_window7__800ep.pth",
}

# Data sets on which the authors lowered the augmentation threshold T, for lack of memory, and the
# threshold there (their published code states them): sets whose tasks have many images.
_LARGE = ("quickdraw", "fungi", "mscoco", "ChestX", "cifar100", "Food101")
_RESNET = dict.fromkeys(("quickdraw", "ChestX", "cifar100"), 10)
_SEVEN = dict.fromkeys((*_LARGE, "traffic_sign"), 15)
LOWERED = {
    "resnet50": _RESNET,
    "resnet50_3blocks": _RESNET,
    "dino_resnet50": _RESNET,
    "dino_vits16": dict.fromkeys(_LARGE, 15),
    "dino_vits8": dict.fromkeys(_LARGE, 10) | {"quickdraw": 5, "Food101": 5, "cifar100": 2},
    "deit_base": {"quickdraw": 25},
    "dino_vitb16": {"quickdraw": 25},
    "densenet161": dict.fromkeys(("quickdraw", "fungi", "ChestX", "cifar100"), 10),
    "regnety_016": dict.fromkeys(("ChestX", "cifar100"), 15),
    "swin_base_simmim": _SEVEN,
    "clip_vitl14": _SEVEN,
}
