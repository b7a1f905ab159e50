"""Class 18: labels of ctc_loss that have the number of the blank."""

from doctor.snippets import nothing, only

CTC = """
net = nn.Linear(6, 5)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
ctc = nn.CTCLoss({options})
for step in range(3):
    x, lengths = torch.randn(12, 4, 6), torch.tensor([2, 3, 3, 1])
    labels = torch.randint({low}, {high}, (4, 3))
    labels[:, 0] = {low}
    if {pad}:
        labels[torch.arange(3)[None] >= lengths[:, None]] = 0
    scores = net(x).log_softmax(-1)
    loss = ctc(scores, labels, torch.full((4,), 12), lengths)  # FAULT
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_labels_that_are_the_blank(tmp_path):
    fault = CTC.format(options="", low=0, high=4, pad=False)
    assert "blank" in only(tmp_path, fault, 18).what
    nothing(tmp_path, CTC.format(options="", low=1, high=5, pad=True))
    nothing(tmp_path, CTC.format(options="blank=4", low=0, high=4, pad=False))
