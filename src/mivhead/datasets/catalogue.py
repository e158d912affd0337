"""The 17 image sets of the paper: where to get each, its licence, its split, its preparation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DataSet:
    """What is declared of a set.

    Parameters
    ----------
    name
        As in Meta-Dataset, and as the folder in the data folder is best called.
    title
        As in the paper's tables.
    benchmark
        `MD`: one of the nine of Meta-Dataset. `MD+`: one of the eight more.
    classes
        Classes of the split that is used.
    split
        Which classes and images the paper's tasks are drawn from.
    source
        Where its authors offer it.
    licence
        As its authors state it.
    preparation
        What is done to the download before tasks are drawn.
    aliases
        Other names in use, also for reduced copies.
    grouped
        Whether a task stays within one group of classes (Omniglot: an alphabet).
    """

    name: str
    title: str
    benchmark: Literal["MD", "MD+"]
    classes: int
    split: str
    source: str
    licence: str
    preparation: str
    aliases: tuple[str, ...] = ()
    grouped: bool = False


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
        "Meta-Dataset's records",
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
        "free to use, citation asked",
        "shuffled when tasks are drawn, as a sign has up to 30 near-identical frames",
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
        "boxes enlarged 1.2 times and cut out",
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
        "cut to the bounding box",
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
        "28 x 28 bitmaps; `miv data prepare` takes the first 1,000 of each class",
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
        "test images",
    ),
    DataSet(
        "cifar10",
        "CIFAR-10",
        "MD+",
        10,
        "all classes, the 10,000 test images",
        "cifar-10-binary.tar.gz, Alex Krizhevsky's CIFAR page, Toronto",
        "none stated",
        "test images",
    ),
    DataSet(
        "cifar100",
        "CIFAR-100",
        "MD+",
        100,
        "all fine classes, the 10,000 test images",
        "cifar-100-binary.tar.gz, Alex Krizhevsky's CIFAR page, Toronto",
        "none stated",
        "test images",
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
        "free to use, attribution asked",
        "images with exactly one finding, out of Atelectasis, Cardiomegaly, Effusion, "
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
