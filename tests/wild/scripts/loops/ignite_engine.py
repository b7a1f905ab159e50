"""pytorch-ignite: its supervised trainer, accumulating gradients over two batches."""

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy
from torch import nn
from weights import save_digest

torch.manual_seed(0)
data = [(torch.randn(16, 8), torch.randint(0, 3, (16,))) for _ in range(10)]
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
trainer = create_supervised_trainer(
    model, optimizer, nn.CrossEntropyLoss(), gradient_accumulation_steps=2
)
evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy()})
trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _: evaluator.run(data))
trainer.run(data, max_epochs=2)
save_digest(model, updates=trainer.state.iteration)
