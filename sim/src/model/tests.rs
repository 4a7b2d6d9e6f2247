use super::*;

fn file(text: &str) -> State {
    State::new(0o100_644, 0, 0, Body::File(text.as_bytes().to_vec(), 1))
}

fn model() -> Model {
    Model::new(State::new(0o40_755, 0, 0, Body::Dir(BTreeMap::new())))
}

#[test]
fn who_does_not_look_at_attributes_does_not_decide_them() {
    let mut m = model();
    let s = m.begin();
    let mut with = file("a");
    with.xattrs = Some(Xattrs::from([(b"user.a".to_vec(), b"1".to_vec())]));
    m.appended(s, 1, vec![(10, file("a"))]);
    m.appended(s, 2, vec![(10, with.clone())]);
    m.ended(s, 2);
    let mut blind = file("a");
    blind.xattrs = None;
    assert!(m.observe(None, 10, &blind).is_ok());
    assert!(m.observe(None, 10, &with).is_ok());
    assert!(m.observe(None, 10, &file("a")).is_err(), "decided by now");
}

#[test]
fn who_sees_what_it_made_itself_sees_that_what_came_later_is_lost() {
    let mut m = model();
    let (a, b) = (m.begin(), m.begin());
    m.appended(a, 1, vec![(10, file("a"))]);
    m.appended(b, 1, vec![(10, file("b"))]);
    m.ended(b, 1);
    assert!(m.observe(Some(a), 10, &file("a")).is_ok());
    assert_eq!(m.current(10), Some(&file("a")));
    assert!(m.observe(None, 10, &file("b")).is_err(), "decided by now");
}

#[test]
fn an_attribute_has_the_value_that_was_set_last() {
    let mut m = model();
    let s = m.begin();
    let mut with = file("a");
    with.xattrs = Some(Xattrs::from([(b"user.a".to_vec(), b"1".to_vec())]));
    m.appended(s, 1, vec![(10, with)]);
    assert!(m.may_have_xattr(10, b"user.a", Some(b"1")).is_ok());
    assert!(m.may_have_xattr(10, b"user.a", Some(b"2")).is_err());
    assert!(m.may_have_xattr(10, b"user.a", None).is_err());
    assert!(m.may_have_xattr(10, b"user.b", None).is_ok());
    m.appended(s, 2, vec![(10, file("a"))]);
    assert!(m.may_have_xattr(10, b"user.a", Some(b"1")).is_err());
    m.headless(s);
    assert!(m.may_have_xattr(10, b"user.a", Some(b"1")).is_ok(), "the removal may be lost");
}

#[test]
fn what_fsync_covered_must_be_seen_and_the_cut_is_one_for_all_inodes() {
    let mut m = model();
    let s = m.begin();
    for (seq, text) in [(1, "a"), (2, "b"), (3, "c")] {
        m.appended(s, seq, vec![(10, file(text))]);
    }
    m.appended(s, 4, vec![(11, file("late"))]);
    m.vouched(s, 2).unwrap();
    m.ended(s, 4);
    assert!(m.observe(None, 10, &file("a")).is_err(), "below what fsync covered");
    assert!(m.observe(None, 10, &file("b")).is_ok());
    assert!(m.observe(None, 10, &file("c")).is_err(), "decided already");
    assert!(m.observe(None, 11, &file("late")).is_err(), "3 is lost, so is 4");
    assert!(m.observe(None, 11, &State::gone()).is_ok());
}

#[test]
fn a_living_session_shows_its_last_version_only() {
    let mut m = model();
    let (a, b) = (m.begin(), m.begin());
    m.appended(a, 1, vec![(10, file("a"))]);
    m.appended(a, 2, vec![(10, file("b"))]);
    assert!(m.observe(Some(b), 10, &file("a")).is_err());
    assert!(m.observe(Some(b), 10, &file("b")).is_ok());
    m.ended(a, 2);
    assert!(m.observe(Some(b), 10, &file("a")).is_err(), "another client saw it: it stays");
}
