"""Image sets: the 17 of the paper and some more; where to get each, its licence and preparation."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mivhead.errors import InputError


@dataclass(frozen=True)
class DataSet:
    """Facts about one of the paper's image sets.

    Parameters
    ----------
    name : str
        Name in Meta-Dataset, and the recommended name of its folder in the data folder.
    title : str
        Name in the paper's tables.
    benchmark : {"MD", "MD+"} or None
        `MD`: one of the nine sets of Meta-Dataset. `MD+`: one of the eight additional sets. None: a
        set that the paper does not use; it is not part of the paper's averages.
    classes : int
        Number of classes in the split that is used.
    split : str
        The classes and images that the paper's tasks are sampled from.
    source : str
        Where its authors publish it.
    licence : str
        Licence as stated by its authors.
    preparation : str
        How the download is processed before tasks are sampled.
    aliases : tuple of str, default=()
        Other names in use, including those of reduced copies.
    grouped : bool, default=False
        Whether a task stays within one group of classes (in Omniglot, an alphabet).
    paper_size : int, optional
        Side to which the paper's authors resized its images before everything else.
    """

    name: str
    title: str
    benchmark: Literal["MD", "MD+"] | None
    classes: int
    split: str
    source: str
    licence: str
    preparation: str
    aliases: tuple[str, ...] = ()
    grouped: bool = False
    paper_size: int | None = None


SETS = (
    DataSet(
        "omniglot",
        "Omniglot",
        "MD",
        659,
        "the 20 alphabets of images_evaluation",
        "images_evaluation.zip of github.com/brendenlake/omniglot",
        "MIT",
        "a class is a character; a task stays within one alphabet",
        grouped=True,
    ),
    DataSet(
        "cu_birds",
        "Birds",
        "MD",
        30,
        "Meta-Dataset's 30 test classes",
        "CUB_200_2011.tgz of Caltech-UCSD Birds-200-2011, Caltech Vision Lab",
        "non-commercial research and education; images belong to their photographers",
        "none; whole photographs",
        ("cub200_birds", "cub", "cub_200_2011"),
    ),
    DataSet(
        "dtd",
        "Textures",
        "MD",
        7,
        "Meta-Dataset's 7 test classes",
        "dtd-r1.0.1.tar.gz of the Describable Textures Dataset, Oxford VGG",
        "research only",
        "none",
        ("dtd_textures10", "dtd_textures", "describable_textures"),
    ),
    DataSet(
        "fungi",
        "Fungi",
        "MD",
        200,
        "Meta-Dataset's 200 test classes",
        "FGVCx Fungi 2018 (fungi_train_val.tgz, train_val_annotations.tgz), GBIF labs",
        "research and education, non-commercial (Danish Svampe Atlas)",
        "none",
        ("fgvcx_fungi",),
    ),
    DataSet(
        "vgg_flower",
        "VGG Flower",
        "MD",
        16,
        "Meta-Dataset's 16 test classes",
        "102flowers.tgz and imagelabels.mat of the 102 Category Flower Dataset, Oxford VGG",
        "none stated; research use",
        "none",
        ("vgg_flower102", "flowers102", "vgg_flowers"),
    ),
    DataSet(
        "traffic_sign",
        "Traffic Sign",
        "MD",
        43,
        "all 43 classes of the training images",
        "GTSRB_Final_Training_Images.zip of the German Traffic Sign Recognition Benchmark",
        "free to use, citation requested",
        "shuffled when tasks are sampled, as a sign has up to 30 near-identical frames",
        ("gtsrb_traffic_signs", "gtsrb", "traffic_signs"),
    ),
    DataSet(
        "mscoco",
        "MSCOCO",
        "MD",
        40,
        "Meta-Dataset's 40 test classes, boxes of train2017",
        "train2017.zip and annotations_trainval2017.zip of COCO, cocodataset.org",
        "annotations CC BY 4.0; images under the terms of Flickr",
        "boxes enlarged 1.2 times and cropped",
        ("mscoco_crops", "coco"),
    ),
    DataSet(
        "aircraft",
        "Aircraft",
        "MD",
        15,
        "Meta-Dataset's 15 test variants",
        "fgvc-aircraft-2013b.tar.gz of FGVC-Aircraft, Oxford VGG",
        "non-commercial research only",
        "cropped to the bounding box",
        ("fgvc_aircraft",),
    ),
    DataSet(
        "quickdraw",
        "Quick Draw",
        "MD",
        52,
        "Meta-Dataset's 52 test classes",
        "the numpy_bitmap files of the Quick, Draw! Dataset, Google",
        "CC BY 4.0",
        "28 x 28 bitmaps; the first 1,000 of each class, or all with --per-class 0",
        ("quickdraw345", "qdraw"),
    ),
    DataSet(
        "mnist",
        "MNIST",
        "MD+",
        10,
        "all classes, the 10,000 test images",
        "t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, Yann LeCun's MNIST page",
        "CC BY-SA 3.0, as usually stated",
        "test images; the authors resized them to 84 x 84 pixels (Lanczos)",
        paper_size=84,
    ),
    DataSet(
        "cifar10",
        "CIFAR-10",
        "MD+",
        10,
        "all classes, the 10,000 test images",
        "cifar-10-binary.tar.gz, Alex Krizhevsky's CIFAR page, Toronto",
        "none stated",
        "test images; the authors resized them to 84 x 84 pixels (Lanczos)",
        paper_size=84,
    ),
    DataSet(
        "cifar100",
        "CIFAR-100",
        "MD+",
        100,
        "all fine classes, the 10,000 test images",
        "cifar-100-binary.tar.gz, Alex Krizhevsky's CIFAR page, Toronto",
        "none stated",
        "test images; the authors resized them to 84 x 84 pixels (Lanczos)",
        paper_size=84,
    ),
    DataSet(
        "CropDisease",
        "CropDisease",
        "MD+",
        38,
        "all classes, the training images",
        "PlantVillage colour images (on Kaggle as New Plant Diseases Dataset)",
        "CC BY-SA 3.0",
        "none",
        ("plantvillage_cropdisease", "plantvillage", "crop_disease"),
    ),
    DataSet(
        "EuroSAT",
        "EuroSAT",
        "MD+",
        10,
        "all classes and images",
        "EuroSAT.zip (RGB) of github.com/phelber/EuroSAT",
        "MIT",
        "none",
    ),
    DataSet(
        "ISIC",
        "ISIC",
        "MD+",
        7,
        "all classes, the training images",
        "ISIC2018_Task3_Training_Input.zip and _GroundTruth.zip of the ISIC 2018 challenge",
        "CC BY-NC 4.0",
        "the class is the column of the ground truth that is 1",
        ("isic_skin_lesions", "isic2018"),
    ),
    DataSet(
        "ChestX",
        "ChestX",
        "MD+",
        7,
        "7 findings, images with one finding only",
        "ChestX-ray14 of the NIH Clinical Center (images/ and Data_Entry_2017.csv)",
        "free to use, attribution requested",
        "images with exactly one finding among Atelectasis, Cardiomegaly, Effusion, "
        "Infiltration, Mass, Nodule, Pneumothorax",
        ("chestx_nih", "chestxray14"),
    ),
    DataSet(
        "Food101",
        "Food101",
        "MD+",
        101,
        "all classes and images",
        "food-101.tar.gz, ETH Zurich Computer Vision Lab",
        "research only (images of Foodspotting)",
        "none",
        ("food101_small", "food-101"),
    ),
)

# Sets that the paper does not use. BSCD-FSL's four sets are among the paper's: CropDisease,
# EuroSAT, ISIC and ChestX. So are seven of FewTrans' ten, as its code lists them
# (github.com/Frankluox/FewTrans, write_yaml_test_with_arg.py, commit 9290c48): vgg_flower,
# aircraft, dtd, fungi, cifar100, EuroSAT and CropDisease; the other three follow below. FewTrans
# does not crop aircraft, and takes classes beyond the paper's splits.
MORE_SETS = (
    DataSet(
        "imagenet_sketch",
        "ImageNet-Sketch",
        None,
        1000,
        "all classes and images",
        "the download of github.com/HaohanWang/ImageNet-Sketch",
        "none stated",
        "none; the classes are ImageNet's numbers, such as n01440764",
    ),
    DataSet(
        "domainnet_quickdraw",
        "DomainNet Quickdraw",
        None,
        345,
        "all classes and images",
        "quickdraw.zip of DomainNet, ai.bu.edu/M3SDA",
        "see its page",
        "none",
    ),
    DataSet(
        "ucf101",
        "UCF101",
        None,
        101,
        "the middle frame of every video",
        "UCF-101-midframes.zip, linked in DATASETS.md of github.com/KaiyangZhou/CoOp",
        "see the page of UCF101, crcv.ucf.edu/data/UCF101.php",
        "none; one class per action",
    ),
    DataSet(
        "medimeta",
        "MedIMeta",
        None,
        0,
        "the first classification task of one of its 19 medical sets",
        "zenodo.org/records/7884735: unpack one set, and give its folder (with info.yaml)",
        "an open licence per set, stated in its info.yaml",
        "images of 224 pixels, sorted into the classes of the task",
    ),
    DataSet(
        "fashion_mnist",
        "Fashion-MNIST",
        None,
        10,
        "the 10,000 test images",
        "data/fashion of github.com/zalandoresearch/fashion-mnist",
        "MIT",
        "none; white on black",
    ),
    DataSet(
        "trashnet",
        "TrashNet",
        None,
        6,
        "all classes and images",
        "data/dataset-resized.zip of github.com/garythung/trashnet",
        "MIT",
        "none",
    ),
    DataSet(
        "beans",
        "iBean",
        None,
        3,
        "all classes of the training images",
        "train.zip of github.com/AI-Lab-Makerere/ibean",
        "MIT",
        "none",
        ("ibean",),
    ),
    DataSet(
        "oxford_pets",
        "Oxford-IIIT Pet",
        None,
        37,
        "all classes and images",
        "images.tar.gz of the Oxford-IIIT Pet Dataset, Oxford VGG",
        "CC BY-SA 4.0",
        "sorted into breeds by the names of the files",
        ("oxford_iiit_pet", "pets"),
    ),
)


def find_declared(name: str) -> DataSet | None:
    """Find a declared set by its name, its title in the paper or an alias.

    Parameters
    ----------
    name : str
        Compared without regard to case and punctuation.

    Returns
    -------
    DataSet or None
        None if the set is not declared.

    Examples
    --------
    >>> find_declared("Birds").name, find_declared("cub200_birds").name
    ('cu_birds', 'cu_birds')
    >>> find_declared("my_own_photos") is None
    True
    """
    wanted = _simplify(name)
    for each in SETS + MORE_SETS:
        if wanted in map(_simplify, (each.name, each.title, *each.aliases)):
            return each
    return None


def unknown_set(name: str) -> str:
    """Return what to tell someone who asks for a set that is not declared.

    >>> unknown_set("trashne")
    "'trashne' is not a declared set: did you mean 'trashnet'?"
    >>> unknown_set("my_photos")
    "'my_photos' is not a declared set; `miv data list` shows them."
    """
    near = difflib.get_close_matches(name, [each.name for each in SETS + MORE_SETS], n=1)
    hint = f": did you mean {near[0]!r}?" if near else "; `miv data list` shows them."
    return f"{name!r} is not a declared set{hint}"


def paper_size(name: str) -> int | None:
    """Return the side to which the paper's authors resized the images of a set first, if any.

    >>> paper_size("CIFAR-10"), paper_size("aircraft")
    (84, None)
    """
    info = find_declared(name)
    return None if info is None else info.paper_size


def _simplify(name: str) -> str:
    return re.sub(r"[\W_]", "", name.casefold())


def groups_of(name: str, classes: Iterable[str]) -> dict[str, str]:
    """Return the group of each class; each task of a grouped set stays within one group.

    Only Omniglot has groups, its alphabets. Its classes are named `alphabet.character`, with a dot
    or a slash. In other sets, the group is an empty string.

    >>> groups_of("omniglot", ["Greek.character01", "Latin/character02"])
    {'Greek.character01': 'Greek', 'Latin/character02': 'Latin'}
    >>> groups_of("birds", ["robin", "wren"])
    {'robin': '', 'wren': ''}
    """
    info = find_declared(name)
    if info is None or not info.grouped:
        return dict.fromkeys(classes, "")
    groups = {each: re.split(r"[./]", each, maxsplit=1)[0] for each in classes}
    if ungrouped := [each for each, group in groups.items() if each == group]:
        raise InputError(
            f"The class {ungrouped[0]!r} of {name} does not name its alphabet; name the class "
            "folders alphabet.character, such as Greek.character01."
        )
    return groups
