"""Your own models in one file: functions that build a torch module.

    pluribus.run("fedgh", models=[tiny_net, small_cnn, "mlp-64"], clients=3, rounds=2)
    pluribus.run("fedgh", models=small_cnn(num_classes=10), clients=2, rounds=2)

On the command line, functions are named by their dotted paths:

    pluribus run fedgh --models examples.my_model.tiny_net,mlp-64 --width 64 --rounds 5
    pluribus run fedgh --models examples.my_model.small_cnn,mlp-64 --rounds 5

`tiny_net` returns a backbone, one flat feature vector per image: the library adds the head. `small_cnn` returns a
classifier: the library splits it at its last linear layer. The widths of the features are measured and brought to the K
that the clients share, by pooling. Client i gets model i mod the number of models.
"""

from torch import nn


def tiny_net(shape: tuple[int, int, int]) -> nn.Module:
    """One convolution and 32 features, for images of `shape` (channels, height, width)."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 8, kernel_size=3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(4),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 32),
        nn.ReLU(),
    )


def small_cnn(num_classes: int, in_channels: int = 1) -> nn.Module:
    """A classifier with one convolution and 32 features."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 32),
        nn.ReLU(),
        nn.Linear(32, num_classes),
    )
