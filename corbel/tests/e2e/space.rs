//! What lies below a volume comes to an end before the volume does.

use std::fs;

use super::harness::{CORBEL, Scratch, TESTS, limited, may_mount, text};

/// In a mount namespace of its own, on a small tmpfs. Nothing ends by a signal: who asks for more than there is hears ENOSPC, and
/// the service starts again on a file system that is full. What is reserved is there, whatever others take.
#[test]
fn a_full_file_system_below_is_enospc() {
    if !may_mount() {
        return;
    }
    let scratch = Scratch::new();
    fs::create_dir(scratch.path("s")).unwrap();
    let mut command = limited();
    command.args(["unshare", "-m", "python3"]).arg(format!("{TESTS}/run/space.py"));
    command.arg(CORBEL).arg(scratch.path("s"));
    let alive = "[None, None, None]";
    assert_eq!(
        text(&command.output().expect("unshare starts")),
        format!(
            "mkfs of too much: 1 True\n\
            takes nothing: True\n\
            sparse: 0\n\
            written until it is full: ENOSPC True {alive}\n\
            and again, when there is room: none 50 {alive}\n\
            others: ENOSPC\n\
            written where others were: ENOSPC {alive}\n\
            ended: [0, 0, 0]\n\
            others: ENOSPC\n\
            a start on a full one: {alive} a log: 4 no space left on device\n\
            what was there: 50\n\
            and it goes on: ('none', 20) {alive}\n\
            reserved: 0\n\
            others: ENOSPC\n\
            all that was promised: ENOSPC True {alive}\n\
            and after a start: True {alive}\n\
            given back, and taken again: ENOSPC True {alive}\n\
            checked: 0\n"
        )
    );
}
