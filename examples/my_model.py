"""Your own model in one file: a function that takes the shape of the images and returns a backbone.

    pluribus run fedgh --models examples.my_model.tiny_net,mlp-64 --width 64 --rounds 5

The backbone returns one flat feature vector per image. The library measures its width, brings it to the K that the
clients share (here 64, by pooling), and adds the head. Client i gets model i mod 2.
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
