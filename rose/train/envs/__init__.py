"""Environments: one module each, over the protocol of :mod:`rose.train.envs.base`."""
