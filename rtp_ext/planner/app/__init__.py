"""`rtp-ext plan --app`: the planner as a page in a browser of this machine.

`settings` turns fields into the command's arguments, `view` arguments into what figures show, `figures` that into HTML,
`page` lays it out and answers changes, `command` starts it. Only `figures` and `page` need Dash. It was chosen since it
serves all scripts from installed packages, so that the page needs no network, keeps no state on the server, and brings
the fewest packages: 27; NiceGUI 48, Panel 30, Streamlit 33, Gradio 51 (November 2026), of which the last three take two
to three times the space.
"""
