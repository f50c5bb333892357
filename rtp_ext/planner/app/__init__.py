"""`rtp-ext plan --app`: the planner as a page in a browser of this machine.

`settings` turns fields into the command's arguments, `view` arguments into what figures show, `figures` that into HTML,
`page` lays it out and answers changes, `command` starts it. Only `figures` and `page` need Dash. It was chosen since it
serves all scripts from installed packages, so that the page needs no network, keeps no state on the server, and brings
the fewest packages: 27, against 48 of NiceGUI, 30 of Panel, 33 of Streamlit and 51 of Gradio (November 2026). Panel,
Streamlit and Gradio take two to three times the space.
"""
