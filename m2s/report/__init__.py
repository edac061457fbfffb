"""Figures, tables and the HTML report.

A figure or table is computed from result files, and its numbers are written beside it as JSON.

* `m2s.report.page` writes the HTML page of `m2s report`; `sections` computes its data and `templates` renders them.
* `m2s.report.toy` is Figure 1 of the paper.
* `m2s.report.audit` prints and plots the result of `m2s audit`.
* `m2s.report.lab` is the static page of `m2s lab`, with the networks that it runs.
* `m2s.report.curves`, `traces`, `methods`, `film_strip` and `samples` plot training runs and samples.

Functions that plot return a matplotlib `Figure` and write no file, unless their name begins with `write`.
"""
