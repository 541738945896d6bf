"""Joins the trainer's ranks: process groups, lockstep, and small values between them."""
