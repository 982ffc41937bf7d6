"""Equal tokens are not equal prompts: images, embeddings and adapters separate them.

The simulated worker knows what each position really was, so that a hit on the wrong
one is a wrong state, which the fixture's check reports beside these assertions.
"""

import pytest
import torch
from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from vllm_fork.events import PrefixReused

BLOCK, UNIT = 64, 16
PLACEHOLDER = 9

WHERE = {
    # (text before the image, its placeholders, text behind it, answer)
    "in the tail, below the first unit": (3, 5, 2, 4),
    "in the tail, behind a unit": (34, 6, 1, 4),
    "over the tail's first token": (28, 10, 2, 4),
    "up to the tail's first token": (22, 10, 3, 8),
    "from the tail's first token on": (32, 6, 3, 4),
    "whole units before the tail": (10, 10, 20, 20),
    "over a block's edge": (58, 12, 5, 7),
    "in the blocks before the tail's": (10, 10, 70, 80),
    "longer than a block": (20, 90, 5, 17),
    "at the prompt's end": (20, 6, 0, 4),
    "at the prompt's end, one token answered": (20, 6, 0, 1),
    "at the very beginning": (0, 5, 3, 4),
}


def image(identifier, offset, length):
    """What vLLM's input processor makes of an image; its pixels take no part here."""
    place = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(None, "image", identifier, place)


@pytest.fixture
def start_with_encoder(start):
    """Engines of a model that reads images; ``embeddings`` that its cache holds."""

    def start_engine(embeddings=4096, **options):
        talk = start(exact_tail=True, **options)
        talk.scheduler.max_num_encoder_input_tokens = embeddings
        talk.scheduler.encoder_cache_manager = EncoderCacheManager(embeddings)
        return talk

    return start_engine


@pytest.fixture
def executed(is_async):
    """Tokens of a finished sequence whose state is there."""
    return lambda sequence: len(sequence) - (not is_async)


@pytest.mark.parametrize("where", WHERE)
def test_an_image_separates(start_with_encoder, executed, where):
    """Another image, none, or the same one a token off: nothing from it on is shared.
    The same image in the same place: everything is."""
    before, length, behind, num_answer = WHERE[where]
    talk = start_with_encoder()
    prompt = [*talk.tokens(before), *[PLACEHOLDER] * length, *talk.tokens(behind)]
    answer = talk.answer(num_answer)
    cat = image("cat", before, length)
    talk.ask(prompt, answer, mm_features=[cat])
    follow_up = prompt + answer + talk.tokens(20)
    # One that could be published under the same key if the key forgot the image.
    talk.ask(prompt, answer, mm_features=[image("dog", before, length)])
    for others in (
        [image("bird", before, length)],
        [image("cat", before + 1, length)],
        [image("cat", before, length), image("icon", before + length + behind, 1)],
        [],
    ):
        shared = before if len(others) < 2 else before + length + behind
        assert talk.cached_tokens(follow_up, mm_features=others) <= shared
    for same in ("cat", "dog"):
        features = [image(same, before, length)]
        cached = talk.cached_tokens(follow_up, mm_features=features)
        assert cached == executed(prompt + answer)


@pytest.mark.parametrize("num_text", [4, 34, 40])
def test_an_image_moved_within_its_own_placeholders(
    start_with_encoder, executed, num_text
):
    """The tokens are the same wherever the image begins."""
    talk = start_with_encoder()
    prompt = [*talk.tokens(num_text), *[PLACEHOLDER] * 9]
    answer = talk.answer(3)
    places = [image("cat", num_text + i, 5) for i in range(3)]
    follow_up = prompt + answer + talk.tokens(20)
    for i, place in enumerate(places):
        assert talk.cached_tokens(follow_up, mm_features=[place]) <= num_text + i
        assert talk.scheduler.reset_prefix_cache()
    for place in places:
        talk.ask(prompt, answer, mm_features=[place])
    for place in places:
        cached = talk.cached_tokens(follow_up, mm_features=[place])
        assert cached == executed(prompt + answer)


def test_placeholders_that_were_sampled(start_with_encoder, executed):
    """A model that says an image's token has not seen an image."""
    talk = start_with_encoder()
    prompt, answer = talk.tokens(34), [PLACEHOLDER] * 5 + talk.answer(3)
    talk.ask(prompt, answer)
    follow_up = prompt + answer + talk.tokens(20)
    seen = [image("cat", 34, 5)]
    assert talk.cached_tokens(follow_up, mm_features=seen) == 32
    assert talk.cached_tokens(follow_up) == executed(prompt + answer)


def test_an_image_in_the_next_turn(start_with_encoder, executed):
    """It follows the tail directly, and does not change what lies before it."""
    talk = start_with_encoder()
    history = talk.tokens(30) + talk.answer(10)
    talk.ask(history[:30], history[30:])
    behind = len(history)
    prompt = [*history, *[PLACEHOLDER] * 8, *talk.tokens(4)]
    for identifier in ("cat", "dog"):
        features = [image(identifier, behind, 8)]
        cached = talk.cached_tokens(prompt, mm_features=features)
        assert cached == executed(history)


def test_a_next_turn_that_waits_for_the_encoder(start_with_encoder, executed):
    """It finds its tail at each attempt to be admitted, and is served it once."""
    talk = start_with_encoder(embeddings=8)
    history = talk.tokens(30) + talk.answer(10)
    talk.ask(history[:30], history[30:])
    busy = talk.begin(
        [*talk.tokens(5), *[PLACEHOLDER] * 8],
        talk.answer(30),
        mm_features=[image("dog", 5, 8)],
    )
    first = executed(history)
    prompt = [*history[:first], *[PLACEHOLDER] * 8]
    waiting = talk.begin(
        prompt, talk.answer(5), mm_features=[image("cat", first, 8)], request_id="waits"
    )
    release = talk.scheduler.encoder_cache_manager.free_encoder_input
    talk.scheduler.encoder_cache_manager.free_encoder_input = lambda *args: None
    talk.decode_until(busy, 20)
    assert waiting.num_computed_tokens == 0
    talk.scheduler.encoder_cache_manager.free_encoder_input = release
    talk.engine.run()
    assert talk.engine.finished["waits"].cached_tokens == first
    reused = [
        event
        for event in talk.events.of_type(PrefixReused)
        if event.request_id == "waits"
    ]
    assert [event.source_kind for event in reused] == ["exact_tail"]


def embedded(num_rows, seed):
    return torch.rand(num_rows, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_prompt", [10, 40, 70])
def test_prompt_embeddings_separate(start, is_async, num_prompt):
    """vLLM hashes the rows of every block, and those of a decoded token are missing in
    the request that decoded it: so a tail serves the prompt it ends with, not the
    answer, which vLLM's own blocks do not serve either."""
    talk = start(exact_tail=True)
    same, other = embedded(num_prompt, 1), embedded(num_prompt, 2)
    for rows in (same, other):
        talk.ask(None, talk.answer(1), prompt_embeds=rows)
    new = embedded(20, 3)
    units = num_prompt // UNIT * UNIT
    for rows in (same, other):
        prompt = torch.cat([rows, new])
        cached = talk.cached_tokens(None, prompt_embeds=prompt)
        assert cached == (units if is_async else num_prompt)
    for seed in (4, 5):
        prompt = torch.cat([embedded(num_prompt, seed), new])
        assert talk.cached_tokens(None, prompt_embeds=prompt) == 0
        # Told apart by the rows of the tail alone.
        tail = embedded(num_prompt - units, 10 + seed)
        prompt = torch.cat([same[:units], tail, new])
        assert talk.cached_tokens(None, prompt_embeds=prompt) == units
    assert talk.cached_tokens([0] * num_prompt + talk.tokens(20)) == 0


@pytest.mark.parametrize("num_answer", [5, 20])
def test_an_answer_to_embeddings_is_not_reused(start, num_answer):
    """Replayed as tokens beside the same rows: refused, whatever the rows are there."""
    talk = start(exact_tail=True)
    rows, answer = embedded(40, 1), talk.answer(num_answer)
    talk.ask(None, answer, prompt_embeds=rows)
    behind = answer + talk.tokens(5)
    num_behind = len(behind)
    for filled in (torch.zeros(num_behind, 4), embedded(num_behind, 2)):
        cached = talk.cached_tokens(
            [0] * 40 + behind,
            prompt_embeds=torch.cat([rows, filled]),
            prompt_is_token_ids=[False] * 40 + [True] * num_behind,
        )
        assert cached == 32


ADAPTERS = [
    LoRARequest("one", 1, "/adapters/one"),
    LoRARequest("two", 2, "/adapters/two"),
    LoRARequest("one", 3, "/adapters/one, retrained"),
    None,
]


@pytest.mark.parametrize("num_answer", [4, 100])
def test_adapters_take_turns(start, executed, num_answer):
    """One adapter at a time fits: who waits for another is admitted later, and finds
    its own conversation."""
    talk = start(exact_tail=True)
    talk.scheduler.lora_config = LoRAConfig(max_loras=1)
    prompt, answer = talk.tokens(10), talk.answer(num_answer)
    history = prompt + answer
    for _ in range(2):
        requests = [
            talk.begin(prompt, answer, lora_request=adapter) for adapter in ADAPTERS
        ]
        talk.engine.run()
    assert all(request.is_finished() for request in requests)
    follow_ups = [
        talk.begin(history + talk.tokens(9), talk.answer(20), lora_request=adapter)
        for adapter in ADAPTERS
    ]
    talk.engine.step()
    running = {request.lora_request for request in talk.scheduler.running}
    assert len(running - {None}) == 1, "the scheduler did not make adapters wait"
    talk.engine.run()
    for request in follow_ups:
        record = talk.engine.finished[request.request_id]
        assert record.cached_tokens == executed(history)
    unknown = LoRARequest("three", 4, "/adapters/three")
    assert talk.cached_tokens(history + talk.tokens(9), lora_request=unknown) == 0


@pytest.mark.parametrize("checkpoints", [{}, {"copy_interval": UNIT}])
def test_checkpoints_on_the_grid_separate_too(start, is_async, checkpoints):
    """Block-aligned ones and rolling copies go by vLLM's own hashes."""
    talk = start(**checkpoints)
    talk.scheduler.max_num_encoder_input_tokens = 4096
    talk.scheduler.encoder_cache_manager = EncoderCacheManager(4096)
    prompt = [*talk.tokens(20), *[PLACEHOLDER] * 9, *talk.tokens(5)]
    answer = talk.answer(120)
    talk.ask(prompt, answer, mm_features=[image("cat", 20, 9)])
    follow_up = prompt + answer + talk.tokens(20)
    reached = len(prompt + answer) - 1
    reached = reached // UNIT * UNIT if checkpoints else 2 * BLOCK
    for identifier, expected in (("dog", UNIT), ("cat", reached)):
        features = [image(identifier, 20, 9)]
        cached = talk.cached_tokens(follow_up, mm_features=features)
        assert cached <= expected
        assert cached == expected or identifier == "dog"
