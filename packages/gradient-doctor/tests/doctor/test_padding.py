"""Class 19: lengths that do not fit, masks that let nothing or padding through."""

import pytest

from doctor.look import look, names

LENGTHS = """\
embed, head = nn.Embedding(9, 4), nn.Linear(4, 9)
optimizer = torch.optim.SGD([*embed.parameters(), *head.parameters()], lr=0.1)
for _ in range(2):
    prompt, answer = torch.randint(0, 9, (2, 17)), torch.randint(0, 9, (2, 20))
    tokens = torch.cat([prompt, answer], dim=1)
    law = F.log_softmax(head(embed(tokens))[:, {cut}], dim=-1)
    chosen = law.gather(-1, tokens[:, {shift}, None]).squeeze(-1)
    mask = torch.arange(20) < 15
    loss = -(chosen * mask).sum() / mask.sum()  # HERE
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_both_lengths_are_traced_to_where_they_come_from(tmp_path):
    found = look(tmp_path, LENGTHS.format(cut=":-1", shift="1:"))
    finding = found.one(19)
    assert "36 and 20" in finding.what
    assert "36 = (17 + 20) - 1" in finding.why
    assert len(finding.related) == 2
    assert any("17 + 20" in note for note in found.error.__notes__)
    look(tmp_path, LENGTHS.format(cut="-21:-1", shift="-20:")).clean()


def test_a_crash_in_a_step_without_trace_still_has_its_line(tmp_path):
    body = LENGTHS.replace("range(2)", "range(5)").format(cut="-21:-1", shift="-20:")
    body = body.replace("(chosen * mask)", "(chosen[:, _ // 4 :] * mask)")
    finding = look(tmp_path, body).one(19)
    assert "19 and 20" in finding.what


MASKED = """\
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
other = nn.Linear(4, 1)
optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
for step in range(4):
    x = torch.randn(6, 4)
    error = (model(x).squeeze(-1) - x.sum(-1)).square()
    {mask}
    loss = {loss}
    loss = loss + {other}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
NOTHING = "mask = torch.arange(6) >= 6  # HERE"
SOME = "mask = torch.arange(6) >= 2"
USES = {
    "where": "torch.where(mask, error, torch.zeros(())).sum() / mask.sum().clamp(min=1)",
    "factor": "(error * mask.float()).sum() / mask.sum().clamp(min=1)",
    "fill": "error.masked_fill(~mask, 0.0).mean()",
    "index": "error[mask].sum()",
    "mean-of-nothing": "error[mask].mean()",
}


def masked(tmp_path, mask, loss, other="0.0"):
    return look(tmp_path, MASKED.format(mask=mask, loss=loss, other=other))


@pytest.mark.parametrize("use", USES)
def test_a_mask_that_lets_nothing_through(tmp_path, use):
    found = masked(tmp_path, NOTHING, USES[use])
    ours = [f for f in found.of(19) if f.severity > 1]
    assert len(ours) == 1
    if use != "fill":  # there the mask is the line's own ~mask
        assert ours[0].site.line == found.line
    assert {"0.weight", "2.bias"} <= names(ours[0])
    # neither the zeros nor the NaN that follow are told a second time
    assert not [f for f in found.findings if f.severity > 1 and f.number in (20, 27)]


@pytest.mark.parametrize("use", USES)
def test_a_mask_that_lets_something_through(tmp_path, use):
    found = masked(tmp_path, SOME, USES[use], "0.1 * other(x).square().mean()")
    found.clean()


def test_one_empty_part_of_a_loss_is_named_with_its_parameters(tmp_path):
    found = masked(tmp_path, NOTHING, USES["where"], "other(x).square().mean()")
    assert names(found.one(19)) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_one_empty_batch_among_others_is_bad_luck(tmp_path):
    mask = "mask = torch.arange(6) >= (6 if step == 1 else 2)"
    masked(tmp_path, mask, USES["where"], "other(x).square().mean()").clean()


TOKENS = """\
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.body = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, input_ids, attention_mask=None):
        return self.head(self.body(self.embed(input_ids))[0])

model = LM()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    ids = torch.randint(1, 11, (4, 9))
    real = torch.arange(9) < torch.tensor([9, 7, 6, 4])[:, None]
    ids = torch.where(real, ids, 0){flip}
    attention = {attention}
    logits = model(ids, attention_mask=attention)[:, :-1]
    target = ids[:, 1:]
    {loss}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
RIGHT_LOSS = "loss = F.cross_entropy(logits.transpose(1, 2), target, ignore_index=0)"
GATHERED = "F.log_softmax(logits, -1).gather(-1, target[..., None]).squeeze(-1)"


def tokens(tmp_path, attention, loss=RIGHT_LOSS, flip=""):
    return look(tmp_path, TOKENS.format(attention=attention, loss=loss, flip=flip))


def test_a_mask_of_ones_over_padded_rows(tmp_path):
    found = tokens(tmp_path, "torch.ones_like(ids)  # HERE").one(19)
    assert "3 of 4 rows" in found.what
    assert "10 of 36" in found.why
    tokens(tmp_path, "(ids != 0).long()").clean()


def test_a_missing_mask_matters_where_padding_comes_first(tmp_path):
    assert tokens(tmp_path, "None", flip=".flip(1)").of(19)[0].severity == 2
    assert not [f for f in tokens(tmp_path, "None").of(19) if f.severity > 1]


LEAKS = {
    "cross-entropy": "loss = F.cross_entropy(logits.transpose(1, 2), target)  # HERE",
    "flat": "loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())  # HERE",
    "unmasked": f"loss = -{GATHERED}.mean()  # HERE",
    "full-mask": (
        "mask = target >= 0  # HERE\n"
        f"    loss = -torch.where(mask, {GATHERED}, torch.zeros(())).sum() / mask.sum()"
    ),
    "shifted-mask": (
        "mask = real[:, :-1]  # HERE\n"
        f"    loss = -torch.where(mask, {GATHERED}, torch.zeros(())).sum() / mask.sum()"
    ),
}


@pytest.mark.parametrize("loss", LEAKS)
def test_padding_that_counts_in_the_loss(tmp_path, loss):
    found = tokens(tmp_path, "(ids != 0).long()", LEAKS[loss])
    (finding,) = [f for f in found.of(19) if f.severity > 1]
    if loss != "shifted-mask":  # a slice of a good mask has the good mask's line
        assert finding.site.line == found.line


MASKS = {
    "ignored": RIGHT_LOSS,
    "labels": (
        "labels = torch.where(real[:, 1:], target, -100)\n"
        "    loss = F.cross_entropy(logits.transpose(1, 2), labels)"
    ),
    "none": (
        "each = F.cross_entropy(logits.transpose(1, 2), target, reduction='none')\n"
        "    loss = (each * real[:, 1:]).sum() / real[:, 1:].sum()"
    ),
    "where": (
        f"each = {GATHERED}\n"
        "    loss = -torch.where(real[:, 1:], each, torch.zeros(())).sum() / real[:, 1:].sum()"
    ),
    "labels-unreduced": (
        "labels = torch.where(real[:, 1:], target, -100)\n"
        "    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction='none')\n"
        "    loss = each.sum() / real[:, 1:].sum()"
    ),
}


@pytest.mark.parametrize("loss", MASKS)
def test_padding_that_is_masked(tmp_path, loss):
    tokens(tmp_path, "(ids != 0).long()", MASKS[loss]).clean()


# rows of different lengths, with no mask in sight

RAGGED = """\
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8{pad})
        self.read = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 12)
    def forward(self, ids, lengths):
        h = self.embed(ids)
        {forward}
model = Tagger()
optimizer = torch.optim.Adam(model.parameters())
for step in range(4):
    lengths = torch.randint(3, 7, (16,))
    ids = torch.randint(1, 12, (16, 20))
    ids = torch.where(torch.arange(20) < lengths[:, None], ids, 0)
    {loss}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
ALL_STATES = "return self.head(self.read(h)[0])"
NEXT = "loss = F.cross_entropy(model(ids[:, :-1], lengths).transpose(1, 2), ids[:, 1:]{more})"
LABEL = "loss = F.cross_entropy(model(ids, lengths), ids[:, 0])"


def ragged(forward=ALL_STATES, loss=LABEL, pad=""):
    return RAGGED.format(forward=forward, loss=loss, pad=pad)


@pytest.mark.parametrize("pad", ["", ", padding_idx=0"])
def test_padding_among_the_next_tokens(tmp_path, pad):
    found = look(tmp_path, ragged(loss=NEXT.format(more="") + "  # HERE", pad=pad))
    assert "ignore_index=0" in found.one(19).fix
    look(tmp_path, ragged(loss=NEXT.format(more=", ignore_index=0"), pad=pad)).clean()


def test_padding_at_the_beginning_of_rows(tmp_path):
    flipped = "ids = torch.where(torch.arange(20) < lengths[:, None], ids, 0).flip(1)"
    left = ragged(loss=NEXT.format(more="") + "  # HERE").replace(
        "ids = torch.where(torch.arange(20) < lengths[:, None], ids, 0)", flipped
    )
    look(tmp_path, left).one(19)
    look(tmp_path, left.replace("ids[:, 1:]", "ids[:, 1:], ignore_index=0")).clean()
    # the last state is that of the last word
    last = ragged("return self.head(self.read(h)[0][:, -1])")
    last = last.replace("lengths[:, None], ids, 0)", "lengths[:, None], ids, 0).flip(1)")
    look(tmp_path, last).clean()


LAST = {
    "output": "return self.head(self.read(h)[0][:, -1])  # HERE",
    "dropout": "out = F.dropout(self.read(h)[0], 0.1)\n"
    "        return self.head(out[:, -1])  # HERE",
    "state": "_, state = self.read(h)  # HERE\n        return self.head(state[-1])",
}
AT_THE_LENGTH = {
    "gathered": "return self.head(self.read(h)[0][torch.arange(len(h)), lengths - 1])",
    "packed": "packed = nn.utils.rnn.pack_padded_sequence("
    "h, lengths, batch_first=True, enforce_sorted=False)\n"
    "        return self.head(self.read(packed)[1][-1])",
}


@pytest.mark.parametrize("forward", LAST.values(), ids=LAST)
def test_the_state_after_the_padding(tmp_path, forward):
    assert "pack_padded_sequence" in look(tmp_path, ragged(forward)).one(19).fix


@pytest.mark.parametrize("forward", AT_THE_LENGTH.values(), ids=AT_THE_LENGTH)
def test_the_state_after_the_text(tmp_path, forward):
    look(tmp_path, ragged(forward)).clean()


@pytest.mark.parametrize("ids", ["ids[:, -1] = 0", "ids = ids.clamp(max=3)", "ids[:, 9:] = 5"])
def test_rows_of_one_length_have_no_padding(tmp_path, ids):
    body = ragged(LAST["output"], NEXT.format(more=""))
    start = body.index("    ids = torch.where")
    end = body.index("\n", start)
    body = body[:start] + f"    {ids}" + body[end:]
    body = body.replace("return self.head(self.read(h)[0][:, -1])", ALL_STATES)
    look(tmp_path, body).clean()
