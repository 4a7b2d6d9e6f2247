"""An ordinary Python program: keeps notes in files, renames, lists, reads back. Knows nothing of
Corbel. Usage: notes.py DIRECTORY"""
import hashlib
import json
import os
import sys
import tempfile

root = sys.argv[1]
os.makedirs(root, exist_ok=True)
digests = {}
for number in range(200):
    body = json.dumps({"number": number, "text": "x" * (number * 37 % 5000)}).encode()
    handle, temporary = tempfile.mkstemp(dir=root)
    with os.fdopen(handle, "wb") as note:
        note.write(body)
        note.flush()
        os.fsync(note.fileno())
    name = os.path.join(root, "note-%03d.json" % number)
    os.rename(temporary, name)
    digests[name] = hashlib.sha256(body).hexdigest()
with open(os.path.join(root, "log"), "a", encoding="utf-8") as log:
    for name in sorted(digests):
        log.write("%s %s\n" % (digests[name], os.path.basename(name)))
assert sorted(os.listdir(root)) == sorted([os.path.basename(n) for n in digests] + ["log"])
for name, digest in digests.items():
    with open(name, "rb") as note:
        assert hashlib.sha256(note.read()).hexdigest() == digest, name
os.truncate(os.path.join(root, "log"), 64)
assert os.stat(os.path.join(root, "log")).st_size == 64
print("200 notes written, renamed, listed and read back")
