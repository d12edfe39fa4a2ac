"""Defenses: what a client changes of its data, its model, its training or its update before it sends.

Defenses of data and model take effect before training, and training before the defenses of the update. Defenses of the same side
act in the order in which they are listed: `(clipping, gaussian_noise)` bounds the update and then adds noise,
`(gaussian_noise, clipping)` clips the noise too. Three defenses are special. `dpsgd` adds its noise before all defenses of the
update. `secure_aggregation` must be listed before the defenses of the update. `soteria` scores the model and the data as they are
at its place in the list.
"""
