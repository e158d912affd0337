"""Test classes of Meta-Dataset's split, for the sets that are prepared from their downloads."""

AIRCRAFT = (
    *("737-400", "737-800", "757-200", "767-400", "ATR-42", "BAE-125", "Beechcraft 1900"),
    *("Boeing 717", "CRJ-200", "CRJ-700", "E-170", "L-1011", "MD-90", "Saab 2000", "Spitfire"),
)

TEXTURES = ("banded", "bumpy", "crosshatched", "knitted", "sprinkled", "stratified", "woven")

FLOWERS = {  # by their numbers in the labels of the download
    5: "english marigold",
    9: "monkshood",
    15: "yellow iris",
    19: "balloon flower",
    35: "alpine sea holly",
    40: "lenten rose",
    41: "barbeton daisy",
    42: "daffodil",
    45: "bolero deep blue",
    46: "wallflower",
    65: "californian poppy",
    85: "desert-rose",
    89: "watercress",
    94: "foxglove",
    96: "camellia",
    98: "mexican petunia",
}

DRAWINGS = (
    *("angel", "animal migration", "axe", "bat", "beard", "bee", "bridge", "broom", "bucket"),
    *("butterfly", "cactus", "campfire", "cookie", "couch", "cow", "diving board", "donut"),
    *("drill", "eraser", "feather", "finger", "fire hydrant", "flashlight", "frying pan"),
    *("giraffe", "goatee", "hammer", "helicopter", "helmet", "hockey stick", "hourglass"),
    *("house", "kangaroo", "lantern", "mailbox", "mouse", "palm tree", "parrot", "rabbit"),
    *("rollerskates", "saw", "saxophone", "snowman", "spider", "stitches", "streetlight"),
    *("sweater", "table", "umbrella", "wheel", "wine bottle", "yoga"),
)

THINGS = (
    *("bicycle", "car", "airplane", "bus", "truck", "boat", "stop sign", "bench", "bird", "horse"),
    *("sheep", "cow", "giraffe", "tie", "frisbee", "skis", "baseball bat", "tennis racket"),
    *("bottle", "wine glass", "cup", "fork", "spoon", "bowl", "banana", "apple", "orange"),
    *("hot dog", "pizza", "chair", "couch", "potted plant", "bed", "mouse", "keyboard", "toaster"),
    *("sink", "refrigerator", "vase", "scissors"),
)

BIRDS = (
    *("008.Rhinoceros_Auklet", "009.Brewer_Blackbird", "015.Lazuli_Bunting"),
    *("020.Yellow_breasted_Chat", "028.Brown_Creeper", "030.Fish_Crow", "035.Purple_Finch"),
    *("039.Least_Flycatcher", "045.Northern_Fulmar", "046.Gadwall", "082.Ringed_Kingfisher"),
    *("085.Horned_Lark", "094.White_breasted_Nuthatch", "101.White_Pelican", "103.Sayornis"),
    *("112.Great_Grey_Shrike", "118.House_Sparrow", "122.Harris_Sparrow", "128.Seaside_Sparrow"),
    *("133.White_throated_Sparrow", "134.Cape_Glossy_Starling", "137.Cliff_Swallow"),
    *("147.Least_Tern", "148.Green_tailed_Towhee", "163.Cape_May_Warbler"),
    *("168.Kentucky_Warbler", "169.Magnolia_Warbler", "170.Mourning_Warbler"),
    *("193.Bewick_Wren", "194.Cactus_Wren"),
)
