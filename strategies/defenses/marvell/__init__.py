"""Marvell: noise with the covariance that hides the labels best."""
