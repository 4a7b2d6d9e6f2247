//! One user takes no place from others.

use base::Errno;

use crate::rig::Rig;

#[test]
fn one_user_attaches_as_often_as_it_may_and_root_and_others_still_find_a_place() {
    let mut rig = Rig::new(1, 1);
    let taken = (0..20).filter(|_| rig.try_attach(0, 7)).count();
    assert_eq!(taken, 6, "as the limit for a user is");
    assert_eq!(rig.refused, vec![Errno::NFILE; 14]);
    assert_eq!(rig.nodes[0].status().counters.crowded_out, 14);
    assert!(rig.try_attach(0, 8), "another user");
    assert!(rig.try_attach(0, 0), "root");
    assert!(!rig.try_attach(0, 0), "there are eight places");
}
