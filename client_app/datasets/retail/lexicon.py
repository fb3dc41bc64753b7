"""The vocabulary of the retail corpus, written by hand for this project.

Three kinds of words live here. *Neutral* words mean the same everywhere. *Regional* forms
are written alike but mean different things: false friends between varieties of English and
between languages, and word marks, which are invented (trademarks are territorial, so one
mark may belong to a shoemaker here and to a grocer there). *Families* are sets of spellings
from which every region has chosen one.

The tables are plain text, one entry a line, so that they can be read and extended.
"""

from dataclasses import dataclass

REGIONS = ("US", "UK", "IN", "AU", "MX", "JP", "DE", "BR")

INTENTS = ("clothing", "footwear", "electronics", "grocery", "baby", "home", "sports", "auto")

TYPES = ("product", "brand", "colour", "material", "size", "audience", "season", "feature")
"""Entity types; a season is any occasion, and what is nothing else is a feature."""


@dataclass(frozen=True, slots=True)
class Sense:
    """What a form means in one region; attributes (a colour, a season) have no intent."""

    type: str
    intent: str | None


@dataclass(frozen=True, slots=True)
class Family:
    """Spellings of which every region uses one.

    Attributes
    ----------
    role : str
        ``"modifier"`` stands before a noun of any intent, ``"word"`` stands alone and has no
        intent, and an intent makes it a product of that intent.
    typed : tuple of str
        What people type, in any region.
    spelling : dict of str to str
        What is right, by region.
    """

    role: str
    typed: tuple[str, ...]
    spelling: dict[str, str]


def _table(text: str) -> dict[str, tuple[str, ...]]:
    """Read lines of ``key: word word ...``; a line without a key continues the one before."""
    table: dict[str, tuple[str, ...]] = {}
    key = ""
    for line in text.strip().splitlines():
        before, colon, after = line.rpartition(":")
        key = before if colon else key
        table[key] = (*table.get(key, ()), *after.split())
    return table


def _forms(words: str, marks: str) -> dict[str, dict[str, Sense]]:
    """Read the regional forms, with a mark after every second word (the order is frequency)."""
    read: dict[str, dict[str, Sense]] = {}
    remaining = iter(marks.strip().splitlines())
    for index, line in enumerate(words.strip().splitlines()):
        form, senses = line.split(maxsplit=1)
        read[form] = {}
        for group in senses.split("|"):
            meaning, *regions = group.split()
            read[form] |= dict.fromkeys(regions, _sense(meaning))
        if index % 2 and (row := next(remaining, "")):
            mark, *owners = row.split()
            by_region = zip(REGIONS, owners, strict=True)
            read[mark] = {r: Sense("brand", owner) for r, owner in by_region if owner != "-"}
    return read


def _sense(meaning: str) -> Sense:
    """Read ``home`` (a product), ``home*`` (a brand) or the type of an attribute."""
    if meaning in TYPES:
        return Sense(meaning, None)
    return Sense("brand" if meaning.endswith("*") else "product", meaning.rstrip("*"))


def _families(text: str) -> dict[str, Family]:
    """Read the spelling families, by the spelling of the first region."""
    read: dict[str, Family] = {}
    for line in text.strip().splitlines():
        known, _, typed = line.partition("|")
        role, *spellings = known.split()
        seen = tuple(typed.split()) or tuple(dict.fromkeys(spellings))
        read[spellings[0]] = Family(role, seen, dict(zip(REGIONS, spellings, strict=True)))
    return read


NOUNS = _table("""
clothing: shirt dress jeans blazer hoodie scarf gloves socks leggings cardigan raincoat parka
    kimono poncho bikini swimsuit sash beanie tunic overalls tuxedo bathrobe necktie corset
    mittens kaftan turban tracksuit nightgown sunhat
footwear: shoes loafers heels clogs espadrilles oxfords brogues ballerinas mules wedges insoles
    laces cleats stilettos platforms slingbacks galoshes creepers slides shoehorn footbeds
    winklepickers shoetree spats overshoes
electronics: laptop tablet charger headphones keyboard monitor printer router speaker smartwatch
    earbuds webcam projector television drone console scanner amplifier modem smartphone
    joystick soundbar adapter powerbank processor touchpad antenna subwoofer cable turntable
grocery: rice honey cheese butter olives lentils almonds cereal mustard ketchup vinegar popcorn
    peanuts raisins oats flour eggs garlic ginger spinach carrots onions mushrooms sausages
    salmon coconut cashews granola sesame broccoli spaghetti lemons
baby: rattle teether highchair playpen swaddle bassinet sleepsuit playmat formula bathseat carrier
    bouncer teddy lullaby walker potty romper bootees doll blocks plush cradle layette stacker
    babywrap nightlight changepad
home: pillow blanket curtain mattress mirror candle bookshelf armchair kettle toaster saucepan
    spatula whisk colander teapot cutlery lantern broom bucket hammer ladder shovel lawnmower
    planter fountain hammock clock stool bedsheet cushion blender oven fridge
sports: racket dumbbell treadmill basketball volleyball badminton skateboard snowboard surfboard
    kayak wetsuit goggles trampoline kettlebell boomerang archery javelin paddle barbell whistle
    snorkel dartboard hurdle tent compass canoe rollerskates stopwatch punchbag
auto: dashcam wiper radiator alternator brakes headlight gearbox piston exhaust seatbelt
    odometer bumper sparkplug camshaft airbag coolant antifreeze dashboard hubcap roofrack
    towbar axle speedometer mudflap sunvisor toolbox ratchet engine
""")
"""Products that are called and understood the same everywhere, by intent."""

BRANDS = _table("""
clothing: wovenly threadmoor anselle dravo
footwear: stridewell solemark pacivo trekkina
electronics: voltaro pixeline ampero circuvo
grocery: harvesto goldacre savorin millbee
baby: cuddlo tinkabo littlefern babbino
home: hearthly casabrio oakmere domivo
sports: athlora peakivo sprintex rallio
auto: motrivo drivona torquelo wheelux
""")
"""Invented brands that sell one kind of goods, everywhere."""

MATERIALS = (
    "cotton",
    "linen",
    "leather",
    "bamboo",
    "ceramic",
    "plastic",
    "velvet",
    "canvas",
    "silicone",
    "nylon",
    "wooden",
    "titanium",
)

CONTEXT = _table("""
feature: cheap new best premium classic original soft durable portable foldable waterproof
    luxury handmade vintage modern simple discount popular
size: small medium large xl compact jumbo slim wide 2 4 6 10 12
colour: red blue green black white yellow purple brown beige navy teal ivory crimson turquoise
product: set kit carton box bundle case bag holder cover refill voucher stand
season: summer winter spring christmas easter halloween birthday wedding
audience: women men kids girls boys toddler adults seniors teens ladies
""")
"""Words that go with goods of every intent, so that they give no meaning away, by type."""

_WORDS = """
torch      electronics UK AU IN | home US | sports* JP MX | auto* DE BR
biscuit    grocery UK AU IN JP | colour US | material BR | footwear* MX | baby* DE
jumper     clothing UK AU MX | auto US IN | electronics DE | baby* BR JP
petrol     auto UK AU IN | colour DE | clothing* US | sports* MX JP
kaki       grocery JP DE | colour MX BR | audience IN | footwear* US | baby* UK | home* AU
thongs     footwear AU | clothing US UK | sports* DE | baby* MX | home* JP
handy      electronics DE JP | feature US UK AU | home* IN | grocery* MX | baby* BR
trainer    footwear UK | clothing JP | sports US IN DE | baby AU | home* BR
nana       size JP | audience UK AU IN | baby MX BR | clothing* US | grocery* DE
cooler     sports US AU | electronics IN JP BR | grocery* MX | auto* DE | feature UK
rubber     home UK IN AU | material US JP | auto* DE | footwear* MX | sports* BR
body       baby DE | clothing BR MX | auto IN | electronics JP | feature US UK
cream      colour UK AU IN | grocery US JP | baby DE BR | footwear* MX
puff       home BR MX | grocery UK AU IN | clothing US | baby JP | footwear* DE
papa       grocery MX | audience US DE IN | baby BR | electronics* UK JP
mint       colour US UK DE | grocery IN AU | electronics* JP BR | auto* MX
buggy      baby UK DE | sports AU US | auto IN JP BR | footwear* MX
tan        colour US UK AU | grocery JP | electronics* IN | home* DE | auto* MX
rosa       colour DE MX BR | grocery* US | home* UK | clothing* JP
boot       auto UK IN | footwear US AU | sports DE | home* JP | electronics* BR
stone      colour DE AU | size UK | home US IN | footwear* JP | electronics* MX
mobile     electronics UK AU IN JP | baby US DE | home BR | auto* MX
tin        grocery UK AU | home IN | material US | electronics* BR | sports* JP | footwear* DE
khaki      colour UK IN DE | clothing US | auto* MX | footwear* JP
pan        home US UK AU | grocery MX JP IN | electronics* DE | sports* BR
fall       season US | clothing IN | sports DE | auto* JP | baby* BR | footwear* UK
rock       clothing DE | home US AU | grocery UK IN | auto JP | sports* BR MX
baba       audience IN BR JP | grocery UK AU | baby* US | home* DE | footwear* MX
dummy      baby UK AU | sports US | home IN | electronics DE | auto BR | feature JP
cord       material UK DE | electronics US AU | home* JP | footwear* BR
hose       clothing DE | home US UK AU | auto IN | grocery* BR | sports* JP
marine     colour DE JP | feature US UK AU | sports* MX | footwear* IN
mixer      home US IN BR | grocery UK AU | electronics DE MX | footwear* JP
drill      material UK IN | home US DE JP | sports* BR | auto* MX
pump       footwear US UK JP | home IN | sports AU | electronics* DE | baby MX
cognac     colour US DE | grocery UK AU MX | clothing* JP | auto* IN
jersey     clothing UK AU | sports US IN JP | material DE BR | auto* MX
bordeaux   colour DE BR | grocery US UK AU | footwear* JP | auto* IN
muffler    auto US AU | clothing IN JP UK | footwear* DE | baby* MX
regal      home DE | feature US UK | sports* IN | clothing* JP
mala       home BR | clothing IN | grocery JP UK | sports US | auto* DE | feature MX
mum        audience UK AU | home US | clothing* JP | sports* BR
bonnet     auto UK AU IN | clothing US JP | baby* DE | home* BR | footwear* MX
camel      colour US UK DE | clothing* JP | auto* MX | home* IN
joggers    footwear AU | clothing US UK IN | baby DE | sports JP
kind       audience DE | feature US UK | baby* JP | grocery* BR
cot        baby UK AU | home IN | sports US | grocery* DE BR | clothing* JP MX
chico      size MX | grocery IN | baby* US | footwear* UK
tenis      footwear MX BR | sports JP DE IN | clothing* US | home* UK
plaid      home DE | feature US | clothing UK | auto* JP
wand       home DE | baby US UK | electronics IN | auto* JP BR | sports* MX AU
mist       home DE | colour US UK AU | electronics JP | clothing* IN BR
smoking    clothing DE BR MX | feature UK IN | home AU US | grocery* JP
aubergine  colour US DE | grocery UK | home* BR | sports* AU
hood       auto US | clothing UK AU JP | home IN | electronics* DE | baby* BR
azul       colour MX BR | grocery* US | auto* JP
squash     grocery US UK | sports IN AU DE | baby* JP | footwear* BR
seda       material MX BR | home* US | sports* UK
braces     clothing UK AU | sports US JP | auto* DE MX | baby* IN
gift       home DE | season US UK | electronics* BR
trunk      auto US JP | home UK IN AU | clothing DE | electronics* MX
grande     size MX BR | grocery* AU | auto* UK
comforter  home US IN | baby UK AU | footwear* JP MX | electronics* DE BR
lila       colour DE MX | baby* IN | clothing* US
hamper     grocery UK AU | home US | baby* DE | auto* BR | sports* MX
advent     season DE UK | electronics* US | sports* JP
bib        baby US UK IN | sports AU | clothing DE | auto* BR
handle     auto JP | home US UK AU | baby* DE | electronics* BR | sports* IN MX
cracker    grocery US AU JP | home UK IN | electronics* BR | sports* DE
chips      grocery US UK | electronics MX BR
lana       material MX | footwear* AU
kuro       colour JP | electronics* AU
damen      audience DE | sports* BR
haru       season JP | grocery* MX
sommer     season DE | clothing* IN
klein      size DE | home* UK
holz       material DE | electronics* JP
sona       material IN | baby* AU
"""
# Words that mean something somewhere, the most frequent first: "home" is a product of that
# intent, "home*" a brand, and a bare type an attribute. Where a word means nothing it may be a
# registered mark (those are invented), or not in use. Glosses of the less obvious: a torch
# lights in the UK and melts sugar in the US; biscuit is a colour of American bathrooms and a
# Brazilian modelling clay; petrol is a colour in German; kaki is a persimmon, a colour, and an
# Indian aunt; thongs are worn on Australian feet; a handy is a German mobile; a trainer is a
# Japanese sweatshirt; nana is a number in Japanese; a puff is a Brazilian pouf; stone is a
# British weight; a fall is sewn to an Indian saree; rock is a German skirt, a British sweet and
# a Japanese lock; hose are German trousers; a regal is a German shelf; a mum is an American
# flower.

_MARKS = """
velora     footwear baby home grocery auto clothing sports electronics
kestro     sports electronics baby clothing footwear home auto grocery
mirava     home grocery footwear auto baby sports electronics clothing
tundrix    auto clothing sports electronics grocery baby footwear home
okavi      clothing sports auto home electronics footwear grocery baby
brumel     grocery auto clothing footwear home electronics baby sports
zephira    baby footwear electronics sports clothing grocery home auto
dorvane    electronics home grocery baby sports auto clothing footwear
talvik     footwear auto baby electronics home clothing sports -
norvelle   sports grocery - home electronics footwear auto clothing
pexaro     - clothing home auto grocery electronics baby footwear
quillan    baby sports clothing - auto home grocery electronics
rasvina    auto - footwear sports clothing grocery electronics baby
selkora    home electronics grocery clothing - baby footwear auto
tamarok    clothing footwear sports baby electronics - auto home
ulvena     grocery home auto footwear baby sports - electronics
virello    electronics baby grocery sports home auto clothing -
wexmar     footwear home - electronics clothing baby sports grocery
yalora     clothing auto electronics baby sports - grocery footwear
zentrik    baby clothing sports - grocery footwear home auto
arvento    sports - baby grocery auto electronics clothing home
belquist   - electronics clothing home footwear sports auto baby
corvessa   grocery footwear auto clothing - home baby sports
dalmira    home sports electronics auto baby clothing - grocery
"""
# Invented word marks and their owners' trade, in the order of REGIONS; "-": not registered.

FORMS = _forms(_WORDS, _MARKS)
"""Senses of every regional form by region, the most frequent form first; a region that is
missing does not use the form."""

FAMILIES = _families("""
modifier color colour colour colour color kara colour cor
word napkin nappy nappy nappy napa nabe napf napa | napp naapy napfy nape
clothing pajamas pyjamas pyjama pyjamas pijama pajama pyjama pijama
modifier gray grey grey grey gris gure grau gris
word sack sack saag sack saco sake sakko saco | sak sacke saak sakk
auto tire tyre tyre tyre tire taiya tyre tire
grocery yogurt yoghurt yoghurt yoghurt yogur yoguruto joghurt iogurte
word rope robe rope rope ropa ropu robe roupa | rop roppe roape ropp
footwear sandals sandals sandal sandals sandalias sandaru sandalen sandalia
modifier fiber fibre fibre fibre fibra faiba faser fibra
home lamp lamp lamp lamp lampara ranpu lampe lampada
word touch torch torch torch toca tochi tuch touca | toch tuoch thoch tocch
electronics battery battery battery battery bateria batteri batterie bateria
sports ball ball ball ball bola boru ball bola
baby sterilizer steriliser steriliser steriliser esterilizador suteraiza sterilisator esterilizador
modifier favorite favourite favourite favourite favorita feibaritto favorit favorita
clothing jewelry jewellery jewellery jewellery joyeria jueri juwelen joalheria
word tart tart tart tart torta taruto torte torta | tort taort tartt torrt
auto carburetor carburettor carburettor carburettor carburador kyabureta karburator carburador
footwear sneakers sneakers sneaker sneakers sneakers sunika sneaker sneaker
grocery donut doughnut donut doughnut dona donatsu donut donut
modifier aluminum aluminium aluminium aluminium aluminio arumi aluminium aluminio
word tape tap tap tap tapa tepu tape tampa | tapp taap tpae tappa
home organizer organiser organiser organiser organizador oganaiza organizer organizador
electronics theater theatre theatre theatre teatro shiata theater teatro
sports meter metre metre metre metro metoru meter metro
baby airplane aeroplane aeroplane aeroplane aeroplano eapuren aeroplan aeroplano
word crepes crisps crisps crepes crepas kurepu krepp crepe | creps crips krepes crepps
clothing jacket jacket jacket jacket chaqueta jaketto jacke jaqueta
auto filter filter filter filter filtro firuta filter filtro
footwear moccasin moccasin mocassin moccasin mocasin mokashin mokassin mocassim
grocery salad salad salad salad ensalada sarada salat salada
modifier liter litre litre litre litro rittoru liter litro
word mesh mesh mesh mesh mesa meshi messer mesa | mesz mehs mese messh
home mold mould mould mould molde morudo mould molde
electronics telephone telephone telephone telephone telefono terefon telefon telefone
grocery chili chilli chilli chilli chile chiri chili chile
word polo polo pulao polo pollo poro polster polpa | poll polao ploo poolo
clothing blouse blouse blouse blouse blusa burausu bluse blusa
electronics camera camera camera camera camara kamera kamera camera
baby shampoo shampoo shampoo shampoo champu shanpu shampoo xampu
modifier catalog catalogue catalogue catalogue catalogo katarogu katalog catalogo
word salt salt salt salt salsa sarusa salz sal | sals salzt satl salst
grocery soup soup soup soup sopa supu suppe sopa
""")
"""Spelling families by the spelling of the first region, the most frequent first. A line has the
role, the spellings in the order of REGIONS, and, for a "word", the non-words that people type and
that lie next to a different everyday word in each region (default: any of the spellings)."""

LOCAL = {
    region: _table(text)
    for region, text in {
        "US": """
clothing: sweater suspenders pantyhose
footwear: flipflops
electronics: flashlight cellphone
grocery: eggplant cilantro cookies candy
baby: diaper stroller pacifier crib
home: faucet trashcan closet
sports: soccer fannypack
auto: windshield gasoline fender
""",
        "UK": """
clothing: waistcoat dungarees cagoule
footwear: wellies plimsolls
electronics: satnav telly
grocery: courgette sweets coriander
baby: pushchair pram muslin
home: duvet wheeliebin cupboard
sports: rounders bumbag
auto: windscreen numberplate
""",
        "IN": """
clothing: saree dupatta salwar
footwear: chappals juttis
electronics: inverter geyser
grocery: ghee atta brinjal dal
baby: jhula langot
home: almirah tiffin tawa
sports: carrom kabaddi
auto: stepney silencer
""",
        "AU": """
clothing: trackies bathers dacks
footwear: gumboots
electronics: powerboard
grocery: capsicum rockmelon lollies
baby: pram
home: doona manchester
sports: footy surfski
auto: bullbar ute windscreen
""",
        "MX": """
clothing: chamarra playera rebozo
footwear: huaraches botines
electronics: celular audifonos
grocery: frijoles nopales elote
baby: carriola mamila
home: comal molcajete cobija
sports: balon patineta
auto: llantas cajuela cofre
""",
        "JP": """
clothing: yukata hakama haori
footwear: geta zori
electronics: keitai denchi
grocery: natto miso nori
baby: omutsu bebika
home: hashi donabe zabuton
sports: shinai bokken
auto: kuruma gasorin
""",
        "DE": """
clothing: hemd kleid mantel
footwear: schuhe turnschuhe
electronics: fernseher rechner
grocery: brot wurst kartoffeln
baby: windel schnuller strampler
home: kissen besteck teppich
sports: fussball schlitten
auto: reifen kofferraum auspuff
""",
        "BR": """
clothing: camisa calca agasalho
footwear: chinelo sapato
electronics: fone carregador
grocery: feijao farinha queijo
baby: fralda chupeta mamadeira
home: cadeira toalha fogao
sports: prancha chuteira
auto: pneu volante farol
""",
    }.items()
}
"""What a region calls a product that others call otherwise, by intent; it means the same to all who
know it."""

NEUTRAL_WORDS = frozenset(
    (
        *MATERIALS,
        *(w for table in (NOUNS, BRANDS, CONTEXT) for words in table.values() for w in words),
    )
)
REGIONAL_WORDS = frozenset(
    (
        *FORMS,
        *(word for family in FAMILIES.values() for word in family.spelling.values()),
        *(word for table in LOCAL.values() for words in table.values() for word in words),
    )
)
