"""Figures for papers: what the HTML report draws, as PDF and PNG in one style."""
