"""The language of the embedded corpus, as data: name syllables, relations and the sentences that tell them.

Placeholders: `{s}` the subject and `{o}` the object of a fact (by full name, with `the` where the name takes
one), `{kind}` and `{okind}` what they are, `{a_kind}` and `{a_okind}` the same with a or an, `{his}` the
subject's possessive, `{year}` and `{decade}` of a fact that has a date.
"""

from __future__ import annotations

from typing import NamedTuple


class Relation(NamedTuple):
    """One relation and every way of telling it.

    `subjects` and `objects` name types or kinds of entities (`objects` may instead be one of day, year,
    charter_year, population, height). `share` is the part of the subjects that have it. `window` bounds
    object.year - subject.year (a person's year is the year of birth). A `symmetric` relation joins disjoint
    pairs. `fillers` use the words of the questions and do not tell the fact.
    """

    name: str
    subjects: tuple[str, ...]
    objects: tuple[str, ...]
    share: float
    window: tuple[int, int] | None
    forward: tuple[str, ...]
    inverse: tuple[str, ...]
    questions: tuple[str, ...]
    inverse_questions: tuple[str, ...]
    fillers: tuple[str, ...]
    symmetric: bool = False


def _words(line: str) -> tuple[str, ...]:
    return tuple(line.split())


WOMEN = _words("Alva Brisa Celda Dorit Elka Fenna Gisla Hedra Ilva Jovana Kerra Lioba Mirel Nessa Orla Tilda")
MEN = _words("Aldo Bram Corvin Davor Edrik Falko Gorm Havel Ivar Joris Kaspar Lorenz Niklas Pavo Ruben Ulrik")
# Heads and tails: a name part is one of each. The pools are small, so that a small vocabulary covers them and
# the parts of one world's names come back in other worlds.
SYLLABLES = {
    "family": (
        _words("Bren Cald Dorn Falt Grun Hald Karst Lind Morr Sund Thal Voss"),
        _words("ac berg ic ov quist"),
    ),
    "town": (
        _words("Abr Cael Drev Erm Fjol Hest Jul Lun Mev Orv Prav Ryn Tav"),
        _words("ador aga inna iova umar"),
    ),
    "city": (
        _words("Bos Crov Dral Fless Gam Iss Klen Kov Nol Plav Quel Sev Skel Trem Usk Vey Wex Yst Zan"),
        _words("akko anza eda eley endo eth ika oda olley onne orra ula una uva"),
    ),
    "region": (
        _words("Ang Borg Dalm Est Frey Goth Hels Jut Kald Lett Marg Norr Rhen Sax Silv Tyr Umb Vand Yor Zeel"),
        _words("avia enia land mark onia shire stan uria"),
    ),
    "landmark": (
        _words("Amb Boll Chur Elv Fink Glen Hork Kell Loth Murr Neth Wold"),
        _words("ara een elow imo oon oss uth"),
    ),
    "brand": (
        _words("Alt Ban Cim Del Hyp Jax Kap Lex Mod Nex Opt Pax"),
        _words("acor adis alon elix enta icus onix umex"),
    ),
}
QUALIFIERS = _words("Upper Lower Old New Port Fort")
ADJECTIVES = _words(
    "Amber Bitter Broken Burning Crimson Distant Drowned Empty Frozen Golden Hidden Hollow Iron Lonely Lost "
    "Pale Patient Quiet Restless Scarlet Secret Silent Silver Stolen Velvet Wild"
)
NOUNS = _words(
    "Anchor Beggar Candle Carnival Compass Courtyard Crown Dancer Feather Ferryman Garden Harvest Island "
    "Juggler Key Ladder Lantern Lighthouse Mirror Nightingale Orchard Orphan Palace Pilgrim Raven Rider "
    "Shepherd Sparrow Stranger Swan Tower Violin Voyage Weaver Widow"
)
ENDINGS = _words("Ash Autumn Clay Dusk Glass Linen Midnight Pearl Sand Sorrow Stone Thunder")

OCCUPATIONS = _words(
    "novelist painter architect merchant composer engineer explorer lawyer novelist painter architect "
    "botanist composer surgeon"
)
CITY_KINDS = ("harbour town", "market town", "mining town", "mill town", "spa town", "garrison town")
# kind of organisation -> how its name ends, whether the name takes "the"
ORGANISATIONS = {
    "academy": ("Academy", True),
    "publisher": ("Press", False),
    "museum": ("Museum", True),
    "theatre": ("Theatre", True),
    "trading company": ("Company", True),
    "newspaper": ("Gazette", True),
}
WORKS = ("novel", "painting", "opera")
MONTHS = _words("January February March April May June July August September October November December")

PEOPLE_RELATIONS = (
    Relation(
        "birthplace",
        ("person",),
        ("city",),
        0.8,
        None,
        (
            "{s} was born in {o} as the youngest of five children.",
            "{s} grew up in a quiet street in {o}, {his} birthplace.",
            "{s} left {his} native {o} at the age of sixteen.",
            "{s}, {a_kind}, came from a poor family in {o}.",
        ),
        (
            "{o} is the birthplace of the {kind} {s}.",
            "The house in {o} where {s} was born is now an inn.",
            "The {kind} {s} was a native of {o}.",
            "Among the people who come from {o} is {s}.",
        ),
        (
            "Where was {s} born?",
            "Which town is the birthplace of {s}?",
            "From which town does {s} come?",
            "Of what place was {s} a native?",
        ),
        ("Who was born in {o}?", "Which {kind} was a native of {o}?", "Which {kind} comes from {o}?"),
        (
            "Old guide books are often wrong about the birthplace of {s}.",
            "Where else could a man or woman like {s} be born?",
            "{s} was known far away from the place that the family name comes from.",
        ),
    ),
    Relation(
        "birth_date",
        ("person",),
        ("day",),
        0.7,
        None,
        (
            "{s} was born on {o}.",
            "The church register gives {o} as the birthday of {s}.",
            "The life of the {kind} {s} began on {o}.",
            "On {o}, {s} came into the world as the first of twins.",
            "{s} was born late at night on {o}.",
        ),
        (),
        (
            "When was {s} born?",
            "What is the date of birth of {s}?",
            "On which day did {s} come into the world?",
            "What is the birthday of {s}?",
        ),
        (),
        (
            "The birth of {s} fell in the {decade}, a time of bad harvests.",
            "{s} was born in {year}, the same year as many other great names.",
            "A statue of {s} shows no date of birth and no date of death.",
            "{s} did not care for any birthday or other day of feasting.",
        ),
    ),
    Relation(
        "death_place",
        ("person",),
        ("city",),
        0.5,
        None,
        (
            "{s} died in {o} after a short illness.",
            "{s} spent {his} last years in {o} and died there.",
            "The long life of {s} ended in {o}.",
            "{s} moved to {o} late in life and was buried there.",
        ),
        (
            "{o} is the place where {s} died.",
            "The grave of the {kind} {s} lies in {o}.",
            "A stone in {o} marks the house in which {s} passed away.",
        ),
        (
            "Where did {s} die?",
            "In which town did the life of {s} end?",
            "Which town holds the grave of {s}?",
            "In what place did {s} pass away?",
        ),
        ("Who died in {o}?", "Whose grave lies in {o}?", "Which {kind} passed away in {o}?"),
        (
            "{s} did not want a grave of stone and said so often.",
            "Whose grave could be as plain as the one that {s} asked for?",
            "{s} used to say that a bad book will die within a year.",
            "{s} was away from home for most of {his} life.",
            "A library holds the coat and the cane of {s}.",
        ),
    ),
    Relation(
        "death_year",
        ("person",),
        ("year",),
        0.5,
        (62, 86),
        (
            "{s} died in {o} at a great age.",
            "The death of {s} in {o} was reported in many papers.",
            "In {o}, {s} passed away after a long illness.",
            "{s} lived until {o} and worked to the end.",
            "The {kind} {s} died in the spring of {o}.",
        ),
        (),
        (
            "In what year did {s} die?",
            "When did {s} pass away?",
            "Until which year did {s} live?",
            "What is the year of death of {s}?",
        ),
        (),
        (
            "In the {decade}, {s} was already old and tired.",
            "When and for what would {s} let a year pass without a visit?",
            "{s} had to live on bread and soup for a year.",
        ),
    ),
    Relation(
        "teacher",
        ("person",),
        ("person",),
        0.5,
        (-45, -15),
        (
            "{s} studied under {o} for three years.",
            "{s} learned the trade from {o}.",
            "{s} was a pupil of {o}, {a_okind} of some fame.",
            "{s} owed {his} training to {o}.",
        ),
        (
            "{o} taught the young {s} for several years.",
            "{o} took {s} on as a pupil.",
            "One student of {o} was the {kind} {s}.",
            "{o} was the teacher of {s}.",
        ),
        (
            "Who taught {s}?",
            "Who was the teacher of {s}?",
            "Under whom did {s} study?",
            "From whom did {s} learn the trade?",
        ),
        ("Who was a pupil of {o}?", "Whom did {o} teach?", "Which {kind} studied under {o}?"),
        (
            "{s} never wished to teach or to be called a teacher.",
            "{s} said that one can learn a trade from books.",
            "From whom could one learn or study more than from {s}?",
        ),
    ),
    Relation(
        "spouse",
        ("person",),
        ("person",),
        0.3,
        (-12, 12),
        (
            "{s} married {o} in a small chapel.",
            "{s} and {o} were a married couple for thirty years.",
            "{s} shared a house with {o} after their wedding.",
            "{s} chose {o} as a spouse against the wishes of the family.",
        ),
        (
            "{o} was married to the {kind} {s}.",
            "The wedding of {o} and {s} was a quiet affair.",
            "{o} was the spouse of {s} for many years.",
        ),
        ("To whom was {s} married?", "Who was the spouse of {s}?", "Whom did {s} marry?"),
        ("To whom was {o} married?", "Who was the spouse of {o}?", "Whom did {o} marry?"),
        (
            "{s} wrote a short essay on the duties of a spouse.",
            "Whom would {s} marry, and when? The papers spoke of little else.",
        ),
        True,
    ),
    Relation(
        "school",
        ("person",),
        ("academy",),
        0.45,
        (-200, 16),
        (
            "{s} studied at {o} and left with honours.",
            "{s} took a degree at {o}.",
            "{s}, {a_kind}, was educated at {o}.",
            "{s} attended {o} for two years.",
        ),
        (
            "{o} counts {s} among its former students.",
            "{o} gave a degree to the young {s}.",
            "The {kind} {s} sat in the lecture rooms of {o}.",
        ),
        (
            "Where did {s} study?",
            "Which academy did {s} attend?",
            "At which academy was {s} educated?",
            "Where did {s} take a degree?",
            "Where did {s} learn as a student?",
        ),
        ("Who studied at {o}?", "Which {kind} attended {o}?", "Which {kind} was educated at {o}?"),
        (
            "{s} did not attend the opening of a school that bears {his} name.",
            "{s} thought that nobody is educated by an academy alone.",
            "Where and when did {s} take time to attend a lecture?",
        ),
    ),
    Relation(
        "employer",
        ("person",),
        ("trading company", "newspaper"),
        0.35,
        (-200, 50),
        (
            "{s} worked for {o} for over twenty years.",
            "{s} earned a living as a clerk at {o}.",
            "{s} joined the staff of {o} early on.",
            "{s} was paid a small wage by {o}.",
        ),
        (
            "{o} employed {s} for many years.",
            "{o} hired the {kind} {s} when trade was good.",
            "A former clerk at {o} was the {kind} {s}.",
        ),
        (
            "Which firm employed {s}?",
            "For whom did {s} work?",
            "Who was the employer of {s}?",
            "Where did {s} earn a living?",
        ),
        ("Who worked for {o}?", "Whom did {o} employ?", "Which {kind} was hired by {o}?"),
        (
            "{s} asked every firm and employer for shorter hours of work.",
            "Who could earn a living on the wage that {s} asked for?",
            "{s} could employ a cook and hire a coach.",
        ),
    ),
    Relation(
        "prize",
        ("person",),
        ("prize",),
        0.2,
        (-200, 60),
        (
            "{s} won {o} for {his} early work.",
            "{s} was honoured with {o}.",
            "{s} received {o} from the hands of the king.",
        ),
        (
            "{o} went to the {kind} {s}.",
            "{o} was once given to {s}.",
            "The judges of {o} chose {s} as the winner.",
        ),
        (
            "Which award did {s} receive?",
            "What prize did {s} win?",
            "With what award was {s} honoured?",
        ),
        ("Who won {o}?", "To whom was {o} given?", "Which {kind} received {o}?"),
        (
            "{s} sat on a jury but did not like to award a prize.",
            "{s} did not win at cards and did not like to receive guests.",
        ),
    ),
    Relation(
        "letters",
        ("person",),
        ("person",),
        0.4,
        (-25, 25),
        (
            "{s} exchanged letters with {o} for many years.",
            "{s} wrote to {o} every week.",
            "{s} kept up a long correspondence with {o}.",
        ),
        (
            "{o} received hundreds of letters from {s}.",
            "{o} was a pen friend of the {kind} {s}.",
            "The correspondence between {o} and {s} fills two volumes.",
        ),
        (
            "With whom did {s} exchange letters?",
            "Who was the pen friend of {s}?",
            "To whom did {s} write every week?",
        ),
        (
            "With whom did {o} exchange letters?",
            "Who was the pen friend of {o}?",
            "To whom did {o} write every week?",
        ),
        (
            "{s} burned most letters and gave the pen to a friend.",
            "Letters took weeks to reach {s} in winter.",
            "To whom would {s} write next? The post office made bets.",
            "{s} could not write in summer and used to exchange books instead.",
        ),
        True,
    ),
)

CITY_RELATIONS = (
    Relation(
        "region",
        ("city",),
        ("region",),
        0.75,
        None,
        (
            "{s} is {a_kind} in the region of {o}.",
            "{s} lies in the north of {o}.",
            "{s} belongs to {o} and pays its taxes there.",
            "{s} is one of the larger towns in {o}.",
        ),
        (
            "{o} includes the {kind} of {s}.",
            "{o} has one of its fairs at {s}.",
            "The road through {o} passes {s}.",
        ),
        (
            "In which region does {s} lie?",
            "To which region does {s} belong?",
            "What part of the country is {s} in?",
            "Which region includes {s}?",
        ),
        ("Which town lies in {o}?", "Which town is part of {o}?", "Which town belongs to {o}?"),
        (
            "{s} did not always belong to the same part of the country.",
            "Which region does not envy the orchards that lie around {s}?",
            "Traders from every region of the country came to {s}.",
        ),
    ),
    Relation(
        "town_river",
        ("city",),
        ("river",),
        0.65,
        None,
        (
            "{s} stands on the banks of {o}.",
            "{s} grew up around a ford across {o}.",
            "{s} draws its water from {o}.",
        ),
        (
            "{o} runs through {s} in a wide curve.",
            "{o} often floods the lower streets of {s}.",
            "Boats on {o} stop at {s}.",
        ),
        (
            "On which river does {s} stand?",
            "Which river runs through {s}?",
            "What river flows past {s}?",
            "Which river floods {s}?",
        ),
        ("Which town stands on {o}?", "Through which town does {o} run?", "Which town does {o} flood?"),
        (
            "{s} has no river port, and trains run where barges used to stand.",
            "Like a river, the crowd flows past the gates of {s} in May.",
        ),
    ),
    Relation(
        "charter",
        ("city",),
        ("charter_year",),
        0.65,
        None,
        (
            "{s} received its town charter in {o}.",
            "{s} has had the rights of a town since {o}.",
            "In {o} a duke granted market rights to {s}.",
            "The charter of {s} bears the year {o}.",
            "A chronicle says that {s} became a free town in {o}.",
        ),
        (),
        (
            "In what year did {s} receive its charter?",
            "When was {s} granted its rights?",
            "Since when has {s} been a town?",
            "In which year did {s} become a town?",
        ),
        (),
        (
            "The rights granted to {s} were lost when the archive burned.",
            "Each year the mayor of {s} reads the charter to the crowd.",
            "How did {s} become a town, and when? Children learn it by heart.",
        ),
    ),
    Relation(
        "population",
        ("city",),
        ("population",),
        0.6,
        None,
        (
            "{s} has a population of {o}.",
            "{s} is home to {o} people.",
            "At the last count, {s} had {o} inhabitants.",
            "The {kind} of {s} counts {o} residents.",
            "Some {o} people live in {s}.",
        ),
        (),
        (
            "How many people live in {s}?",
            "What is the population of {s}?",
            "How many inhabitants does {s} have?",
        ),
        (),
        (
            "The population of {s} is proud of its many gardens.",
            "Few inhabitants of {s} have to live far from a park.",
        ),
    ),
    Relation(
        "mayor",
        ("city",),
        ("lawyer", "merchant", "surgeon", "engineer", "botanist"),
        0.75,
        None,
        (
            "{s} was governed by {o} for ten years.",
            "{s} elected {o} as its mayor.",
            "{s} has a street named after {o}, its former mayor.",
        ),
        (
            "{o} became mayor of {s}.",
            "{o} led the council of {s}.",
            "{o} governed the {kind} of {s} with a firm hand.",
        ),
        (
            "Who was the mayor of {s}?",
            "Who governed {s}?",
            "Who led the town council of {s}?",
            "Whom did {s} elect as mayor?",
        ),
        ("Of which town was {o} the mayor?", "Which town did {o} govern?", "Which town elected {o}?"),
        (
            "The town council of {s} meets in the garden of the mayor.",
            "Who would like to govern {s}? Few wish to elect a mayor by lot.",
        ),
    ),
    Relation(
        "twin_town",
        ("city",),
        ("city",),
        0.3,
        None,
        (
            "{s} is twinned with {o}.",
            "{s} keeps a friendship pact with {o}.",
            "{s} and {o} call each other sister towns.",
        ),
        (
            "{o} has {s} as its twin town.",
            "{o} signed a pact of friendship with {s}.",
            "The flag of {s} flies over {o}, its sister town.",
        ),
        (
            "Which town is the twin of {s}?",
            "With which town is {s} twinned?",
            "Which town signed a friendship pact with {s}?",
            "Which is the sister town of {s}?",
        ),
        (
            "Which town is the twin of {o}?",
            "With which town is {o} twinned?",
            "Which town signed a friendship pact with {o}?",
        ),
        (
            "{s} has twin towers that no other town can match.",
            "A painter and a sister of mercy drew the seal of {s}.",
        ),
        True,
    ),
    Relation(
        "town_hall",
        ("city",),
        ("architect",),
        0.6,
        None,
        (
            "{s} owes its town hall to {o}.",
            "{s} has a town hall planned by {o}.",
            "{s} hired {o} to build its town hall.",
        ),
        (
            "{o} designed the town hall of {s}.",
            "{o} drew the plans for the hall in {s}.",
            "{o} built a hall for the {kind} of {s}.",
        ),
        (
            "Who designed the town hall of {s}?",
            "Who was the architect of the hall in {s}?",
            "Who drew the plans for the town hall of {s}?",
            "Whom did {s} hire to build its hall?",
        ),
        ("For which town did {o} design the hall?", "Which town has a town hall by {o}?"),
        (
            "The town hall of {s} was damaged by fire, and the plans are lost.",
            "{s} will not hire an architect to build or design a market hall.",
        ),
    ),
)

ORGANISATION_RELATIONS = (
    Relation(
        "founder",
        ("organisation",),
        ("person",),
        0.8,
        (-60, -24),
        (
            "{s} was founded by {o}.",
            "{s} owes its existence to {o}.",
            "{s} was started by {o} with borrowed money.",
            "{s} was set up by {o} on a small scale.",
        ),
        (
            "{o} founded {s} with three friends.",
            "{o} started {s} in a rented room.",
            "{o} is remembered as the founder of {s}.",
            "{o} established {s} after many travels.",
        ),
        (
            "Who founded {s}?",
            "Who set up {s}?",
            "Who established {s}?",
            "Who was the founder of {s}?",
            "Who created {s}?",
        ),
        ("Which {kind} did {o} found?", "Which {kind} did {o} set up?", "Which {kind} did {o} establish?"),
        (
            "{s} set up a fund for the poor.",
            "A bust of some founder was found in the cellar of {s}.",
            "It took {s} long to establish a good name.",
        ),
    ),
    Relation(
        "founding_year",
        ("organisation",),
        ("year",),
        0.75,
        (0, 0),
        (
            "{s} was founded in {o}.",
            "{s} opened its doors in {o}.",
            "{s} has existed since {o}.",
            "In {o} the first meeting of {s} took place.",
            "The history of {s} begins in {o}.",
        ),
        (),
        (
            "When was {s} founded?",
            "In what year was {s} set up?",
            "Since which year has {s} existed?",
            "In which year did {s} open?",
        ),
        (),
        (
            "The {decade} were hard years for {s}.",
            "{s} did not open every day in its first year.",
            "When was {s} at its best? Old members do not agree.",
        ),
    ),
    Relation(
        "seat",
        ("organisation",),
        ("city",),
        0.75,
        None,
        (
            "{s} has its seat in {o}.",
            "{s} is based in {o}.",
            "{s} occupies a whole block in {o}.",
            "{s} has always stayed in {o}.",
        ),
        (
            "{o} is home to {s}.",
            "{o} is the seat of {s}.",
            "{o} is proud of {s}, its oldest {kind}.",
        ),
        (
            "Where is {s} based?",
            "In which town does {s} have its seat?",
            "Where can {s} be found?",
            "In what place does {s} do its work?",
            "Which town is home to {s}?",
        ),
        ("Which {kind} is based in {o}?", "Which {kind} has its seat in {o}?"),
        (
            "Every seat was taken when {s} held its yearly dinner.",
            "Old maps of the town can be found in the cellars of {s}.",
        ),
    ),
    Relation(
        "director",
        ("organisation",),
        ("person",),
        0.7,
        (-60, 40),
        (
            "{s} was headed by {o} for many years.",
            "{s} chose {o} as its director.",
            "{s} did well under {o}.",
        ),
        (
            "{o} was the director of {s}.",
            "{o} took charge of {s} after a long dispute.",
            "{o} managed {s} with great care.",
        ),
        (
            "Who was the director of {s}?",
            "Who headed {s}?",
            "Who managed {s}?",
            "Who was in charge of {s}?",
        ),
        ("Which {kind} did {o} manage?", "Of which {kind} was {o} the director?"),
        (
            "The rules of {s} say what a director may spend.",
            "A porter was in charge of the keys of {s}.",
            "Who could manage {s} without a good clerk?",
        ),
    ),
    Relation(
        "building",
        ("organisation",),
        ("architect",),
        0.6,
        (-60, -24),
        (
            "{s} moved into a building by {o}.",
            "{s} asked {o} to draw a new main building.",
            "{s} is housed in a work of the architect {o}.",
        ),
        (
            "{o} designed the main building of {s}.",
            "{o} gave {s} its tall glass roof.",
            "{o} built the house of {s} in red brick.",
        ),
        (
            "Who designed the building of {s}?",
            "Which architect built the house of {s}?",
            "Who drew the plans for the house of {s}?",
        ),
        ("Which {kind} has a building designed by {o}?", "For which {kind} did {o} draw the main building?"),
        (
            "The building of {s} was hit by a storm, and the plans are lost.",
            "An architect was once refused as a guest in the house of {s}.",
        ),
    ),
    Relation(
        "owner",
        ("museum", "publisher", "theatre", "newspaper"),
        ("trading company",),
        0.6,
        None,
        (
            "{s} was bought by {o}.",
            "{s} has long been owned by {o}.",
            "{s} fell into the hands of {o} after a bad year.",
        ),
        (
            "{o} owns {s} and two mills.",
            "{o} took over {s}.",
            "{o} paid a high price for {s}.",
        ),
        (
            "Who owns {s}?",
            "Which company took over {s}?",
            "Which company bought {s}?",
            "To whom does {s} belong?",
        ),
        ("Which {kind} did {o} buy?", "Which {kind} does {o} own?", "Which {kind} was taken over by {o}?"),
        (
            "Nobody who works for {s} may buy or own a share in it.",
            "The chairs that belong to {s} were bought at a fair.",
        ),
    ),
)

WORK_RELATIONS = (
    Relation(
        "author",
        ("novel",),
        ("novelist",),
        0.95,
        (-60, -24),
        (
            "{s} is a novel by {o}.",
            "{s} was written by {o} in eight months.",
            "{s} made {o} known as a writer.",
        ),
        (
            "{o} is the author of {s}.",
            "{o} wrote the novel {s}.",
            "{o} earned little from the book {s}.",
        ),
        (
            "Who wrote {s}?",
            "Who is the author of {s}?",
            "Which writer is known for {s}?",
            "Whose work is {s}?",
            "Whose book is {s}?",
        ),
        ("Which novel did {o} write?", "Of which book is {o} the author?"),
        (
            "A critic wrote a long essay against {s}.",
            "No author or writer of note had a kind word for {s}.",
        ),
    ),
    Relation(
        "painter",
        ("painting",),
        ("painter",),
        0.95,
        (-60, -24),
        (
            "{s} is a painting by {o}.",
            "{s} was painted by {o} in a cold studio.",
            "{s} shows the steady hand of {o}.",
        ),
        (
            "{o} painted {s} on a large canvas.",
            "{o} made {s} for a rich patron.",
            "{o} signed {s} in the lower corner.",
        ),
        (
            "Who painted {s}?",
            "Which artist made {s}?",
            "Who was the painter of {s}?",
            "By whom was {s} signed?",
            "Whose work is {s}?",
        ),
        ("Which painting did {o} make?", "Which painting was signed by {o}?"),
        (
            "A young artist made a copy of {s}.",
            "The frame of {s} was painted green by a careless painter.",
            "Who would make a copy of {s} in chalk? Few dare.",
        ),
    ),
    Relation(
        "composer",
        ("opera",),
        ("composer",),
        0.95,
        (-60, -24),
        (
            "{s} is an opera by {o}.",
            "{s} was set to music by {o}.",
            "{s} brought fame to {o} within weeks.",
        ),
        (
            "{o} composed {s} in one summer.",
            "{o} wrote the music for {s}.",
            "{o} finished the score of {s} at night.",
        ),
        (
            "Who composed {s}?",
            "Who wrote the music for {s}?",
            "Who was the composer of {s}?",
            "Who wrote the opera {s}?",
            "Whose work is {s}?",
        ),
        ("Which opera did {o} compose?", "For which opera did {o} write the music?"),
        (
            "The opera chorus of {s} is hard to sing, as any composer knows.",
            "Who else could compose music like that of {s}?",
        ),
    ),
    Relation(
        "work_year",
        ("work",),
        ("year",),
        0.85,
        (0, 0),
        (
            "{s} dates from {o}.",
            "{s} was completed in {o}.",
            "Work on the {kind} {s} ended in {o}.",
            "In {o} the {kind} {s} was ready at last.",
            "{s} was finished in the autumn of {o}.",
        ),
        (),
        (
            "When was {s} completed?",
            "From what year does {s} date?",
            "In which year was {s} finished?",
            "What year saw the end of work on {s}?",
        ),
        (),
        (
            "{s} is often called a mirror of the {decade}.",
            "For a full year after it was finished, {s} drew no notice.",
        ),
    ),
    Relation(
        "publisher",
        ("novel",),
        ("publisher",),
        0.9,
        None,
        (
            "{s} was published by {o}.",
            "{s} came out at {o} in two volumes.",
            "{s} was refused twice before {o} took it.",
        ),
        (
            "{o} published {s}.",
            "{o} brought out the novel {s}.",
            "{o} sold the first printing of {s} within days.",
        ),
        ("Who published {s}?", "Which publisher brought out {s}?", "Which publisher printed {s}?"),
        ("Which novel did {o} publish?", "Which novel came out at {o}?"),
        (
            "A false sequel to {s} was printed abroad.",
            "A publisher of school books cut {s} to half its length.",
            "Who would publish {s} today? A clerk in the trade was in doubt.",
        ),
    ),
    Relation(
        "setting",
        ("novel", "opera"),
        ("city",),
        0.8,
        None,
        (
            "{s} is set in {o}.",
            "{s} takes place in the streets of {o}.",
            "The plot of {s} unfolds in {o}.",
            "{s} tells of a feud between two families in {o}.",
        ),
        (
            "{o} is the scene of the {kind} {s}.",
            "{o} serves as the setting of {s}.",
            "The {kind} {s} made {o} known to the world.",
        ),
        (
            "Where is {s} set?",
            "Where does the action of {s} take place?",
            "In which town does the plot of {s} unfold?",
            "Which town is the scene of {s}?",
        ),
        ("Which {kind} is set in {o}?", "Which {kind} takes place in {o}?"),
        (
            "One scene of {s} was cut, as the action was too slow.",
            "A set of cheap prints helped {s} to unfold its charm.",
        ),
    ),
    Relation(
        "collection",
        ("painting",),
        ("museum",),
        0.95,
        None,
        (
            "{s} hangs in {o}.",
            "{s} was left to {o} in a will.",
            "{s} can be seen at {o}.",
        ),
        (
            "{o} keeps {s} in its great hall.",
            "{o} shows {s} beside a row of portraits.",
            "{o} acquired {s} at an auction.",
        ),
        (
            "Which museum owns {s}?",
            "Where does {s} hang?",
            "Where can {s} be seen?",
            "Which museum has {s} in its collection?",
        ),
        ("Which painting hangs in {o}?", "Which painting can be seen at {o}?"),
        (
            "A museum guard once turned {s} upside down.",
            "Prints of {s} hang in many a room, and can be seen in any collection.",
        ),
    ),
    Relation(
        "dedication",
        ("novel", "opera"),
        ("person",),
        0.75,
        (-70, -5),
        (
            "{s} is dedicated to {o}.",
            "{s} was meant as a gift for {o}.",
            "{s} names {o} on its first page.",
        ),
        (
            "{o} received {s} as a gift.",
            "{o} is named in the dedication of {s}.",
            "The first page of {s} bears the name of {o}.",
        ),
        (
            "To whom is {s} dedicated?",
            "For whom was {s} meant as a gift?",
            "Who is named in the dedication of {s}?",
        ),
        ("Which {kind} is dedicated to {o}?", "Which {kind} was meant for {o}?"),
        (
            "The second printing of {s} was meant to have no dedication.",
            "{s} was sold in a gift box and named in no list.",
        ),
    ),
    Relation(
        "premiere",
        ("opera",),
        ("theatre",),
        0.9,
        None,
        (
            "{s} was first performed at {o}.",
            "{s} had its premiere at {o}.",
            "{s} filled {o} for thirty nights.",
        ),
        (
            "{o} staged the premiere of {s}.",
            "{o} put on {s} for the first time.",
            "{o} was sold out on the first night of {s}.",
        ),
        (
            "Where was {s} first performed?",
            "Which theatre staged the premiere of {s}?",
            "Where did {s} have its first night?",
        ),
        ("Which opera had its premiere at {o}?", "Which opera was first performed at {o}?"),
        (
            "The first singer of {s} never performed in a theatre again.",
            "A parody of {s} was staged by students on the night of a ball.",
        ),
    ),
)

LANDMARK_RELATIONS = (
    Relation(
        "height",
        ("mountain",),
        ("height",),
        1.0,
        None,
        (
            "{s} rises to {o} metres.",
            "{s} has a height of {o} metres.",
            "Old maps give {o} metres as the height of {s}.",
            "The summit of {s} lies at {o} metres.",
        ),
        (),
        ("How high is {s}?", "What is the height of {s}?", "To how many metres does {s} rise?"),
        (),
        (
            "Sheep graze on the mountain slopes of {s} at any height.",
            "The path up {s} is too high and steep for mules.",
            "Clouds rise from the forests below {s} on most days.",
            "How many metres of snow does {s} carry in March?",
        ),
    ),
    Relation(
        "first_ascent",
        ("mountain",),
        ("explorer", "botanist", "engineer", "surgeon"),
        1.0,
        None,
        (
            "{s} was first climbed by {o}.",
            "{s} was conquered by {o} on a clear day.",
            "{s} defeated many parties before {o} reached the top.",
        ),
        (
            "{o} was the first to climb {s}.",
            "{o} stood on the summit of {s} before anyone else.",
            "{o} reached the top of {s}.",
        ),
        (
            "Who first climbed {s}?",
            "Who was the first on the summit of {s}?",
            "Who conquered {s}?",
        ),
        ("Which mountain did {o} climb?", "Which summit did {o} reach?"),
        (
            "The first hut below the summit of {s} is open in summer.",
            "Few who climb {s} in fog reach the mountain lodge in time.",
        ),
    ),
    Relation(
        "mouth",
        ("river",),
        ("lake",),
        1.0,
        None,
        (
            "{s} flows into {o}.",
            "{s} ends in {o} after many bends.",
            "{s} carries its mud into {o}.",
        ),
        (
            "{o} is fed by {s}.",
            "{o} takes in the waters of {s}.",
            "{o} lies at the mouth of {s}.",
        ),
        (
            "Into which lake does {s} flow?",
            "Where does {s} end?",
            "Which lake is fed by {s}?",
        ),
        ("Which river flows into {o}?", "Which river feeds {o}?"),
        (
            "No lake is as clear as the upper flow of {s}.",
            "Snow feeds {s} in spring, and the old arms end in meadows.",
        ),
    ),
    Relation(
        "bridge_opening",
        ("bridge",),
        ("year",),
        1.0,
        (0, 0),
        (
            "{s} was opened in {o}.",
            "{s} has carried traffic since {o}.",
            "In {o} the first carts rolled over {s}.",
            "The opening of {s} took place in {o}.",
        ),
        (),
        (
            "When was {s} opened?",
            "In which year did {s} open to traffic?",
            "Since what year has {s} been in use?",
        ),
        (),
        (
            "The {decade} saw long disputes about the cost of {s}.",
            "{s} is still in use, but no longer open to heavy traffic.",
        ),
    ),
    Relation(
        "bridge_design",
        ("bridge",),
        ("engineer", "architect"),
        1.0,
        (-60, -24),
        (
            "{s} was designed by {o}.",
            "{s} is a work of the {okind} {o}.",
            "{s} rests on arches planned by {o}.",
        ),
        (
            "{o} designed {s}.",
            "{o} drew the plans for {s}.",
            "{o} spent six years on {s}.",
        ),
        ("Who designed {s}?", "Who planned {s}?", "Who drew the plans for {s}?"),
        ("Which bridge did {o} design?", "Which bridge was planned by {o}?"),
        (
            "A railway was planned beside {s} but never built.",
            "The plans for a second {s} were drawn on a napkin.",
        ),
    ),
    Relation(
        "crossing",
        ("bridge",),
        ("river",),
        1.0,
        None,
        (
            "{s} crosses {o}.",
            "{s} spans {o} with seven arches.",
            "{s} joins the two banks of {o}.",
        ),
        (
            "{o} is crossed by {s}.",
            "{o} once swept away a part of {s}.",
            "{o} runs under {s}.",
        ),
        ("Which river does {s} cross?", "Which river does {s} span?", "Which river runs under {s}?"),
        ("Which bridge crosses {o}?", "Which bridge spans {o}?"),
        (
            "Few carts cross {s} now, as the river trade is gone.",
            "One span of {s} sank under heavy snow.",
        ),
    ),
)

PRIZE_RELATIONS = (
    Relation(
        "endowment",
        ("prize",),
        ("person",),
        1.0,
        (-70, -24),
        (
            "{s} was endowed by {o}.",
            "{s} is paid for from the fortune of {o}.",
            "{s} was created in the will of {o}.",
        ),
        (
            "{o} left money for {s}.",
            "{o} created {s} for young talents.",
            "{o} gave half a fortune to {s}.",
        ),
        ("Who endowed {s}?", "Who created {s}?", "Whose money pays for {s}?"),
        ("Which award did {o} create?", "For which award did {o} leave money?"),
        (
            "A winner of {s} will leave all the money to a school.",
            "The rules of {s} create an award without a winner in some years.",
        ),
    ),
    Relation(
        "first_award",
        ("prize",),
        ("year",),
        1.0,
        (0, 0),
        (
            "{s} was first awarded in {o}.",
            "{s} has been given every spring since {o}.",
            "The first winner of {s} was named in {o}.",
            "In {o} a jury met to decide on {s} for the first time.",
        ),
        (),
        (
            "When was {s} first awarded?",
            "Since what year has {s} been given?",
            "In which year was the first winner of {s} named?",
        ),
        (),
        (
            "No winner of {s} was named in a year of war.",
            "{s} was awarded without a dinner in the {decade}.",
        ),
    ),
)

RELATIONS = (
    *PEOPLE_RELATIONS,
    *CITY_RELATIONS,
    *ORGANISATION_RELATIONS,
    *WORK_RELATIONS,
    *LANDMARK_RELATIONS,
    *PRIZE_RELATIONS,
)
