"""The text on which the demo's tokenizer is trained, and the prompts that are asked."""

from __future__ import annotations

CORPUS = """
The river leaves the hills before sunrise and reaches the old mill when the baker opens his door. In winter the water
is slow and dark, and the wheel turns twice in a minute; in spring it is loud, and nobody in the kitchen can hear the
clock. The miller keeps a book in which every sack of grain has a line: who brought it, how heavy it was, what it cost.

A large machine is rarely one machine. A ship has an engine that turns and a bridge that decides, and between them runs
a thin wire with a few words on it: ahead, astern, slow, stop. The engine does not know where the harbour is. The bridge
does not know how hot the oil has become. Each of them can be repaired while the other waits, as long as both agree on
what the words mean and on what to do when the wire is silent.

In a mixture of experts, a router looks at each token and chooses a few experts for it. The token visits them, each
expert gives an answer, and the answers are added together with the weights that the router gave. Most experts sleep
through most tokens, yet all of them must be kept somewhere, because nobody knows which one will be asked next. Memory
is therefore the price of such a model, and where the memory stands is a question that one can answer freely.

When two people count the same coins they should find the same sum. If they do not, one of them has dropped a coin, or
has counted one twice, or has begun with a different bag. It helps to count aloud, one coin after another, so that the
first difference is heard at once and the search for it is short.

The garden behind the school belongs to the third class. They planted beans, onions, two rows of carrots and a pumpkin
that nobody had asked for. Every morning someone writes the temperature on the board: four degrees, seven degrees,
twelve. By June the numbers no longer fit into the small box, so the teacher draws a bigger one, and the pumpkin climbs
over the fence into the yard of the fire station, where the firemen water it on quiet days.

A letter that travels from one city to another passes through many hands. One hand writes the address, one hand weighs
the letter, another sorts it into a box, and a last one finds the door. None of them reads the letter. If a letter gets
lost, the sender waits for some days and then writes again; the receiver must notice if both arrive, and answer once.

Measure first, then cut. A carpenter who trusts his eye will be right on most days and will have a short board on the
others. Write the length down, say who measured it and with which ruler, and the next carpenter can begin where you
stopped. Rules like these sound slow; they are the reason why the roof is dry.

Night trains used to cross the whole country. The conductor walked from carriage to carriage with a lamp, and the
passengers woke up at the border, at the bridge, and once more when the engine was changed. Someone always had bread
and cheese, someone always had a story about the sea, and the windows showed nothing but their own faces and the rain.
"""

PROMPTS = (
    "The river leaves the hills and",
    "In a mixture of experts, a router",
    "When two people count the same coins",
    "A letter that travels from one city to another",
    "The garden behind the school",
    "Night trains used to cross",
    "Measure first, then cut.",
    "A ship has an engine that turns",
)


def prompts(count: int) -> list[str]:
    """``count`` different prompts; beyond the written ones, later sentences of the corpus begin them."""
    sentences = [" ".join(part.split()) for part in CORPUS.replace("\n", " ").split(".")]
    openings = [" ".join(sentence.split()[:7]) for sentence in sentences if len(sentence.split()) > 7]
    pool = list(dict.fromkeys([*PROMPTS, *openings]))
    return [pool[i] if i < len(pool) else f"{pool[i % len(pool)]} ({i})" for i in range(count)]
