"""Defenses: what a client changes of its data, its model, its training or its update before it sends.

The order. Whatever the list says, data and model come before training, and training before the update; within one side,
defenses act in the order in which they are listed: `(clipping, gaussian_noise)` bounds the update and then adds noise,
`(gaussian_noise, clipping)` clips the noise too. Three exceptions are stated where they are made: `dpsgd` adds its noise before
anything else that is done to the update, `secure_aggregation` must stand before the defenses of the update, and `soteria`
judges the model and the data as they are where it stands.
"""
