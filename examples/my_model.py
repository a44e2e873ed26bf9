"""A model of your own, in one file: a function from the shape of the images to a backbone.

    pluribus run fedgh --models examples.my_model.tiny_net,mlp-64 --width 64 --rounds 5

The backbone gives one flat feature vector per image. The library finds its width, brings it to the K that the clients
agree on (here 64, by pooling), and adds the head. Client i gets model i mod 2.
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
