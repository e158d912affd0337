"""Test classes of Meta-Dataset's split, for the sets that are prepared from their downloads."""

AIRCRAFT = (
    *("737-400", "737-800", "757-200", "767-400", "ATR-42", "BAE-125", "Beechcraft 1900"),
    *("Boeing 717", "CRJ-200", "CRJ-700", "E-170", "L-1011", "MD-90", "Saab 2000", "Spitfire"),
)

TEXTURES = ("banded", "bumpy", "crosshatched", "knitted", "sprinkled", "stratified", "woven")

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
