"""Word lists that several regimes share, so that a small vocabulary covers them all."""

NAMES = (
    "Ada", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jack",
    "Kate", "Leo", "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor",
    "Anna", "Boris", "Carla", "Daniel", "Eva", "Frank", "Helen", "Ivan", "Julia", "Lucas",
    "Maria", "Nina", "Oscar", "Peter", "Ruth", "Simon", "Tom", "Vera", "Will", "Zoe",
)  # fmt: skip

THINGS = (
    "apples", "pears", "plums", "cherries", "oranges", "lemons", "nuts", "eggs", "cookies",
    "cakes", "books", "pens", "pencils", "stamps", "coins", "cards", "marbles", "shells",
    "stones", "buttons", "beads", "flowers", "roses", "seeds", "candles", "cups", "plates",
    "toys", "balls", "kites", "keys", "ribbons",
)  # fmt: skip

CONTAINERS = (
    ("box", "boxes"), ("bag", "bags"), ("basket", "baskets"), ("jar", "jars"),
    ("crate", "crates"), ("drawer", "drawers"), ("tray", "trays"), ("packet", "packets"),
)  # fmt: skip

COLORS = (
    "red", "blue", "green", "yellow", "white", "black", "brown", "grey", "pink", "purple",
    "orange", "golden", "silver",
)  # fmt: skip

ANIMALS = (
    "fox", "cat", "dog", "horse", "owl", "bear", "wolf", "rabbit", "mouse", "crow", "deer",
    "goat", "sheep", "duck", "frog", "turtle", "hedgehog", "squirrel", "beaver", "heron",
    "donkey", "robin", "badger", "otter",
)  # fmt: skip

PLACES = (
    "river", "forest", "hill", "bridge", "lake", "garden", "barn", "mill", "valley", "village",
    "market", "meadow", "tower", "harbour", "orchard", "well", "road", "cave", "island", "field",
    "beach", "station", "castle", "farm",
)  # fmt: skip

CITIES = (
    "Paris", "Rome", "Oslo", "Madrid", "Lima", "Cairo", "Delhi", "Tokyo", "Berlin", "Vienna",
    "Dublin", "Prague", "Lisbon", "Athens", "Warsaw", "Boston",
)  # fmt: skip

JOBS = (
    "baker", "doctor", "teacher", "farmer", "pilot", "painter", "sailor", "writer", "tailor",
    "miller", "singer", "gardener",
)  # fmt: skip

SHORT_NOUNS = (
    "sun", "moon", "star", "tree", "leaf", "stone", "cup", "lamp", "chair", "table", "door",
    "key", "boat", "bell", "rope", "hat", "coat", "shoe", "bread", "milk", "salt", "soup",
    "rice", "book", "pen", "map", "clock", "box", "bag", "ball", "drum", "kite",
)  # fmt: skip
