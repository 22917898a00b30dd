"""Generates the demo model's training documents: questions about codes that stand earlier in the document.

A document is a list of `Segment`s: facts ("The code of the red box is 4711.") between filler, then many questions. Only
answers have a weight in the loss (`train.loss_of` gives some other tokens a small one). Codes are random, so that the
model cannot memorize them and must read the KV cache.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tools.demo_model import phrases, smalltalk, words
from tools.demo_model.tokenizer import END_OF_TEXT, IM_END, IM_START

Encode = Callable[[str], list[int]]
Key = str  # "red box"
KEYS: tuple[Key, ...] = tuple(f"{colour} {thing}" for colour in words.COLOURS for thing in words.OBJECTS)


class Segment(NamedTuple):
    ids: list[int]
    weight: float = 0.0
    """Weight of its tokens in the loss."""
    breaks: bool = False
    """Whether a gap in the positions may precede it (`train.stretch`)."""


FIRST, ANSWER, TALK = 3.0, 1.5, 0.25
"""Loss weights of a code's first digit, of its other digits, and of fixed answers, which are long and easy. The first
digit weighs most: the model can recall the others by the digits before them."""


@dataclass(frozen=True)
class Mix:
    """Composition of a document. Each curriculum stage has one."""

    tokens: int  # length of the document, at least
    talk: float = 0.0  # share of turns that are not about a code
    raw: float = 0.35  # share of documents in completion form, without chat markup
    again: float = 0.25  # share of a raw document's turns that repeat a fact, the easiest recall
    canonical: float = 0.5  # share of facts and questions in their first form
    filler: tuple[float, float] = (0.0, 0.9)  # bounds of the share of the context that is filler
    ledger: float = 0.0  # share of documents that are bare ledgers, see `ledger_document`
    joints: int = 1  # how many of `phrases.JOINTS` a ledger uses
    digits: int = 4  # the length of a ledger's codes
    context: tuple[float, float] = (0.3, 0.7)  # bounds of the share of the document before the questions


def thing(rng: random.Random) -> str:
    """Return a noun phrase. Some are keys without a code, so that the model learns that not every key has a code."""
    if rng.random() < 0.25:
        return rng.choice(KEYS)
    noun = rng.choice(words.NOUNS + words.OBJECTS)
    return f"{rng.choice(words.ADJECTIVES + words.COLOURS)} {noun}" if rng.random() < 0.5 else noun


def plain_sentence(rng: random.Random) -> str:
    """Return a sentence of subject, verb, object and sometimes a place."""
    subject = rng.choice(words.PEOPLE) if rng.random() < 0.4 else f"The {thing(rng)}"
    tail = f" {rng.choice(words.PREPOSITIONS)} the {thing(rng)}" if rng.random() < 0.6 else ""
    return f"{subject} {rng.choice(words.VERBS)} the {thing(rng)}{tail}."


def word_salad(rng: random.Random) -> str:
    """Return common words in random order, as benchmarks send them."""
    picked = rng.choices(words.COMMON, k=rng.randint(3, 16))
    return " ".join(picked).capitalize() + rng.choice(".....?!,;")


def noise(rng: random.Random) -> str:
    """Return random letters, digits and characters that the tokenizer encodes as bytes."""
    alphabet = rng.choice(phrases.ALPHABETS)
    made = ("".join(rng.choices(alphabet, k=rng.randint(1, 9))) for _ in range(rng.randint(1, 8)))
    return " ".join(made) + "."


def numbers(rng: random.Random) -> str:
    """Return a sentence with a number that is not a code, so that a digit alone does not mark a fact."""
    return rng.choice(phrases.NUMBERED).format(
        n=rng.randrange(10 ** rng.randint(1, 5)),
        noun=rng.choice(words.NOUNS),
        place=rng.choice(words.NOUNS),
        name=rng.choice(words.PEOPLE),
        key=rng.choice(KEYS),
    )


def repeated(rng: random.Random) -> str:
    """Return one sentence many times, as people make long prompts."""
    sentence = phrases.PANGRAM if rng.random() < 0.5 else plain_sentence(rng)
    return " ".join([sentence] * rng.randint(2, 12))


FILLERS: tuple[Callable[[random.Random], str], ...] = (plain_sentence, word_salad, noise, numbers, repeated)


def filler_style(rng: random.Random) -> Callable[[], str]:
    """Return a document's generator of filler: a random mix of the kinds, often mostly of one kind."""
    weights = (6.0, 3.0, 0.7, 2.0, 0.5)
    bent = [weight * rng.expovariate(1.0) ** 2 for weight in weights]
    return lambda: rng.choices(FILLERS, bent)[0](rng)


def unknown_request(rng: random.Random) -> str:
    """Return a question that the model cannot answer."""
    if rng.random() < 0.15:
        return rng.choice((plain_sentence, word_salad, noise))(rng)
    topic = rng.choice((thing, noise, word_salad, thing))(rng).rstrip(".?!,;").lower()
    opening, article = rng.choice(phrases.UNKNOWN_OPENINGS), rng.choice((" ", " the ", " a "))
    return opening + article + topic + rng.choice(("?", "?", "?", ".", ""))


def small_talk(rng: random.Random) -> tuple[str, str]:
    """Return a request and its fixed answer."""
    asked, answer = rng.choices(smalltalk.SMALL_TALK, (3, 3, 1.5, 1, 1.5, 1.5))[0]
    topic = rng.choice(words.NOUNS + words.OBJECTS)
    return rng.choice(asked).format(word=topic), answer


@dataclass
class Story:
    """A document under construction: its segments, its length, and the codes told so far."""

    rng: random.Random
    mix: Mix
    encode: Encode
    told: dict[Key, str] = field(default_factory=dict)
    keys: list[Key] = field(default_factory=list)
    unasked: list[Key] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    length: int = 0

    def phrase(self, forms: tuple[str, ...]) -> str:
        """Return the canonical form or a random one."""
        return forms[0] if self.rng.random() < self.mix.canonical else self.rng.choice(forms)

    def add_answer(self, answer: str, lead: str = "") -> None:
        """Append an answer with its loss weights."""
        if not answer[0].isdigit():
            self.add(lead + answer, TALK)
            return
        self.add(lead, ANSWER)
        self.add(answer[0], FIRST)
        self.add(answer[1:], ANSWER)

    def add(self, text: str, weight: float = 0.0, breaks: bool = False) -> None:
        ids = self.encode(text)
        self.segments.append(Segment(ids, weight, breaks))
        self.length += len(ids)

    def new_key(self) -> Key:
        """Return a key for a fact. Half share a word with an earlier key, so that the model must read both words."""
        rng = self.rng
        key = rng.choice(KEYS)
        if self.keys and rng.random() < 0.5:
            colour, object_ = rng.choice(self.keys).split()
            if rng.random() < 0.5:
                colour = rng.choice(words.COLOURS)
            else:
                object_ = rng.choice(words.OBJECTS)
            key = f"{colour} {object_}"
        self.keys.append(key)
        return key

    def tell(self) -> str:
        """Return a new fact, or repeat one."""
        key = self.new_key()
        if key not in self.told:
            self.told[key] = f"{self.rng.randrange(10_000):04}"
            self.unasked.append(key)
        return self.phrase(phrases.FACTS).format(key=key, code=self.told[key])

    def tell_context(self, budget: int) -> None:
        """Append `budget` tokens of facts and filler in random order."""
        rng = self.rng
        share, style, glue = rng.uniform(*self.mix.filler), filler_style(rng), rng.choice("    \n")
        end, first = self.length + budget, True
        while self.length < end:
            # Filler sentences and facts are about equally long, so a share of sentences is the same share of tokens.
            sentence = style() if rng.random() < share else self.tell()
            self.add(sentence if first else glue + sentence, breaks=True)
            first = False
        if not self.told and rng.random() < 0.8:
            self.add(glue + self.tell())

    def question(self) -> tuple[str, str]:
        """Return a question about a code, and its answer."""
        rng = self.rng
        if self.told and rng.random() > 0.07:
            key = self.told_key()
            answer = self.told[key]
        else:
            key, answer = rng.choice([key for key in KEYS if key not in self.told]), smalltalk.NOT_TOLD
        return self.phrase(phrases.QUESTIONS).format(key=key), answer

    def told_key(self) -> Key:
        """Return a key with a code, usually one not asked for yet: its code stands only in the distant fact."""
        if not self.unasked or self.rng.random() < 0.1:
            return self.rng.choice(list(self.told))
        return self.unasked.pop(self.rng.randrange(len(self.unasked)))


def chat_document(story: Story) -> list[Segment]:
    """Return a chat. The facts are in the system prompt, in the first user message, or spread over the turns."""
    rng, mix = story.rng, story.mix
    budget = int(mix.tokens * rng.uniform(*mix.context))
    home = rng.choices(("system", "user", "noted", "nowhere"), (4, 5, 2, 10 * mix.talk))[0]
    if home == "system":
        story.add(f"{IM_START}system\n")
        story.tell_context(budget)
        story.add(f"{IM_END}\n")
    opening = home if home in ("user", "noted") else ""
    while story.length < mix.tokens:
        story.add(f"{IM_START}user\n", breaks=True)
        if opening:
            story.tell_context(budget)
        answer_turn(story, opening)
        opening = ""
    return story.segments


def answer_turn(story: Story, opening: str) -> None:
    """Append the end of the user's message and the assistant's answer."""
    rng = story.rng
    if opening == "noted":
        ask, answer = "", smalltalk.NOTED
    elif rng.random() < story.mix.talk:
        ask, answer = talk_turn(story)
    else:
        ask, answer = story.question()
        if rng.random() < 0.1:
            ask = f"{story.tell() if rng.random() < 0.6 else filler_style(rng)()} {ask}"
    glue = rng.choice((" ", " ", "\n", "\n\n")) if opening and ask else ""
    story.add(f"{glue}{ask}{IM_END}\n{IM_START}assistant\n", breaks=bool(ask))
    story.add_answer(f"{answer}{IM_END}")
    story.add("\n")


def talk_turn(story: Story) -> tuple[str, str]:
    """Return a message that asks for no code, and its answer."""
    kind = story.rng.random()
    if kind < 0.2:
        return story.tell(), smalltalk.NOTED
    if kind < 0.55:
        return unknown_request(story.rng), smalltalk.UNKNOWN
    return small_talk(story.rng)


def raw_document(story: Story) -> list[Segment]:
    """Return text without chat markup: context, then questions with `Answer:`, or repeated facts."""
    rng, mix = story.rng, story.mix
    story.tell_context(int(mix.tokens * rng.uniform(*mix.context)))
    form = story.phrase(phrases.COMPLETIONS)
    while story.length < mix.tokens:
        glue = rng.choice(" \n")
        if story.told and rng.random() < mix.again:
            key = story.told_key()
            story.add(f"{glue}The code of the {key} is", breaks=True)
            ask, answer, ends = "", story.told[key], "."
        else:
            ask, answer = story.question()
            story.add(glue + form.format(question=ask), breaks=True)
            ends = rng.choice((END_OF_TEXT, END_OF_TEXT, ".", ""))
        story.add_answer(answer, lead=" ")
        story.add(ends, TALK if ends == END_OF_TEXT else 0.0)
    return story.segments


def ledger_document(story: Story) -> list[Segment]:
    """Return a list of keys and codes, each many times: ` red box is 4. blue door 1. red box: 4.`

    It has four times as many lookups per token as prose, so that the model learns to look up two-word keys within a
    hundred steps. Prose documents can then reuse this skill.
    """
    rng, mix = story.rng, story.mix
    keys = [story.new_key() for _ in range(max(5, mix.tokens // 30))]
    codes = {key: f"{rng.randrange(10**mix.digits):0{mix.digits}}" for key in keys}
    seen: set[Key] = set()
    while story.length < mix.tokens:
        key = rng.choice(keys)
        story.add(f" {key}{rng.choice(phrases.JOINTS[: mix.joints])}", breaks=True)
        if key in seen:
            story.add_answer(codes[key], lead=" ")
        else:
            story.add(f" {codes[key]}")
        story.add(".")
        seen.add(key)
    return story.segments


def document(rng: random.Random, mix: Mix, encode: Encode) -> list[Segment]:
    """Return one training document of at least `mix.tokens` tokens."""
    story = Story(rng, mix, encode)
    if rng.random() < mix.ledger:
        return ledger_document(story)
    return raw_document(story) if rng.random() < mix.raw else chat_document(story)
