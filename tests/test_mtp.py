"""engine/models/mtp.py: what it guesses is what its wiring says, and the same whatever was drafted before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.models.batch import Rows
from engine.models.hybrid import Hybrid
from engine.models.hybrid_cache import HybridCache
from engine.weights.checkpoint import CheckpointError, open_checkpoint
from tests.checkpoints import alone, build
from tests.hybrids import VOCAB, load, reference, save
from tests.test_hybrid import changed

TOKENS = torch.randint(0, VOCAB, (60,), generator=torch.Generator().manual_seed(3))


class Pair(NamedTuple):
    """Ours and transformers' model, and the added tensors."""

    ours: Hybrid
    theirs: Any
    added: dict[str, Tensor]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=[False, True], ids=["one", "experts"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    theirs = reference(experts=request.param)
    folder = save(theirs, tmp_path_factory.mktemp("mtp"), mtp=True)
    added = {k: v for k, v in load_file(folder / "model.safetensors").items() if k.startswith("mtp.")}
    return Pair(load(folder), theirs, added)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + weight)


def guesses(pair: Pair, tokens: Tensor, most: int) -> list[int]:
    """By transformers' own layer, whole at each guess: row t has hidden row t and token t + 1."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as one
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as moe

    model, added = pair.theirs.model, pair.added
    experts = model.config.model_type == "qwen3_5_moe_text"
    layer = (moe.Qwen3_5MoeDecoderLayer if experts else one.Qwen3_5DecoderLayer)(model.config, 3).eval()
    state = {k.removeprefix("mtp.layers.0."): v for k, v in added.items() if "layers.0" in k}
    if experts:
        parts = [[state.pop(f"mlp.experts.{i}.{p}.weight") for p in ("gate_proj", "up_proj", "down_proj")]
                 for i in range(model.config.num_experts)]  # fmt: skip
        state["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(part[:2]) for part in parts])
        state["mlp.experts.down_proj"] = torch.stack([part[2] for part in parts])
    layer.load_state_dict(state)
    hidden, ids, found = model(tokens[None, :-1]).last_hidden_state[0], tokens[1:], list[int]()
    for _ in range(most):
        token = normed(model.embed_tokens(ids), added["mtp.pre_fc_norm_embedding.weight"])
        row = normed(hidden, added["mtp.pre_fc_norm_hidden.weight"])
        x = torch.cat([token, row], -1) @ added["mtp.fc.weight"].T
        at = torch.arange(len(ids))[None]
        mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
        out = layer(x[None], position_embeddings=model.rotary_emb(x[None], at), attention_mask=mask)[0]
        last = normed(out[-1:], added["mtp.norm.weight"])
        found.append(int(pair.theirs.lm_head(last).argmax()))
        hidden, ids = torch.cat([hidden, last]), torch.cat([ids, torch.tensor(found[-1:])])
    return found


@pytest.mark.parametrize("chunk", [7, 40])
def test_guesses_by_its_wiring(pair: Pair, chunk: int) -> None:
    """N3: a chain of guesses behind a prompt read in chunks, then behind rounds: transformers' layer gives the same."""
    assert pair.ours.mtp
    cache = pair.ours.new_cache(80)
    for start in range(0, 40, chunk):
        alone(pair.ours, TOKENS[start : min(start + chunk, 40)], cache, start)
    assert pair.ours.propose(cache, int(TOKENS[40]), 4) == guesses(pair, TOKENS[:41], 4)
    drafted(pair.ours, cache, 40, 5)
    assert pair.ours.propose(cache, int(TOKENS[45]), 4) == guesses(pair, TOKENS[:46], 4)


def drafted(model: Hybrid, cache: HybridCache, start: int, n: int) -> None:
    """Rows ``start`` … by a round: the tokens, each with a wrong one beside it that is refused."""
    tokens = [token for right in TOKENS[start : start + n].tolist() for token in ((right + 1) % VOCAB, right)]
    parents = [parent for row in range(n) for parent in (2 * row - 1, 2 * row - 1)]
    model.forward([Rows(cache, tokens, start, parents, len(tokens), draft=True)])
    cache.keep(start, [2 * row + 1 for row in range(n)])


def test_guesses_do_not_know_what_was_refused(pair: Pair) -> None:
    """N4: after rounds without guesses, refused drafts, a rewind or a resume: as transformers' layer guesses."""
    model, caches = pair.ours, [pair.ours.new_cache(80) for _ in range(3)]
    for cache in caches:
        alone(model, TOKENS[:30], cache, 0)
    plain, busy, resumed = caches
    for row in range(30, 42):
        model.forward([Rows(plain, [int(TOKENS[row])], row, draft=True)])
        plain.keep(row, [0])
    expected = guesses(pair, TOKENS[:43], 3)
    assert model.propose(plain, int(TOKENS[42]), 3) == expected
    model.propose(busy, int(TOKENS[30]), 3)
    drafted(model, busy, 30, 6)  # two rounds without a guess between them
    model.forward([Rows(busy, [1, 2, 3, 4, 5], 36, draft=True)])
    busy.keep(36, [0, 1, 2, 3, 4])
    model.propose(busy, 6, 3)
    assert busy.rewind(36) == 36  # the layer's rows of those five are no longer its text's
    drafted(model, busy, 36, 3)
    drafted(model, busy, 39, 3)
    assert model.propose(busy, int(TOKENS[42]), 3) == expected
    at_once = model.new_cache(80)
    alone(model, TOKENS[:42], at_once, 0)
    assert model.propose(at_once, int(TOKENS[42]), 3) == expected
    for cache in (plain, busy):  # a guess may be right by a row that is wrong
        torch.testing.assert_close(cache.kv.layers[-1][:, :42], at_once.kv.layers[-1][:, :42], rtol=1e-3, atol=1e-4)
    mark = busy.mark()
    resumed.put(0, busy.copy(0, mark.rows))
    resumed.go_back(mark)
    assert model.propose(resumed, int(TOKENS[42]), 3) == expected


def test_guesses_change_no_logits(pair: Pair) -> None:
    """N4: with and without them the next logits are the same bits."""
    asked, silent = pair.ours.new_cache(60), pair.ours.new_cache(60)
    logits = []
    for cache in (asked, silent):
        alone(pair.ours, TOKENS[:20], cache, 0)
        if cache is asked:
            assert len(pair.ours.propose(cache, 5, 8)) == 8
        logits.append(pair.ours.forward([Rows(cache, [5], 20, draft=True)]))
    assert torch.equal(*logits)


def test_no_more_than_there_is_room_for(pair: Pair) -> None:
    """N4: a guess takes a row; before the first row there is nothing to guess from."""
    cache = pair.ours.new_cache(22)
    assert pair.ours.propose(cache, 5, 8) == []
    alone(pair.ours, TOKENS[:20], cache, 0)
    assert len(pair.ours.propose(cache, 5, 8)) == 2 and pair.ours.propose(cache, 5, 0) == []


def test_a_model_without_the_layer_guesses_nothing(tmp_path: Path) -> None:
    """N2: it says so, and its caches have no rows for it."""
    model = load(save(reference(), tmp_path))
    cache = model.new_cache(20)
    alone(model, TOKENS[:10], cache, 0)
    assert not model.mtp and model.propose(cache, 5, 3) == [] and cache.state.hidden.numel() == 0


def test_more_such_layers_than_one(tmp_path: Path) -> None:
    """N1: refused by name."""
    folder = changed(save(reference(), tmp_path, mtp=True), mtp_num_hidden_layers=2)
    with pytest.raises(CheckpointError, match="only one"):
        build(open_checkpoint(folder))
