"""skorch: a classifier as scikit-learn fits it, with dropout, early stopping and a schedule."""

import torch
from sklearn.datasets import make_classification
from skorch import NeuralNetClassifier
from skorch.callbacks import EarlyStopping, GradientNormClipping, LRScheduler
from torch import nn
from weights import save_digest

torch.manual_seed(0)
x, y = make_classification(200, 20, n_informative=10, random_state=0)
net = NeuralNetClassifier(
    nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)),
    criterion=nn.CrossEntropyLoss,
    optimizer=torch.optim.Adam,
    lr=0.01,
    max_epochs=5,
    callbacks=[
        EarlyStopping(patience=3),
        GradientNormClipping(1.0),
        LRScheduler("StepLR", step_size=2),
    ],
    verbose=0,
)
net.fit(x.astype("float32"), y)
save_digest(net.module_, updates=len(net.history))
