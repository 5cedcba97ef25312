"""Four passages and three questions about them: one asked by name, one by number, one without an answer."""

from realmops.questions.question_sets import Question

TEXTS = [
    "The mill burned in 1995.",
    "Ada Vell was born in Tor Hollow.",
    "Ferries cross the lake on Sundays.",
    "TOR HOLLOW has 1 mill.",
]
QUESTIONS = [
    Question("born", "Where was Ada Vell born?", ("Tor Hollow",)),
    Question("mills", "How many mills are there?", ("1",)),
    Question("none", "Who owns the ferry?", ("Orla Quist",)),
]
