use std::cmp::Reverse;
use std::collections::BinaryHeap;

use base::random::Random;

use super::*;
use crate::price::{Kind, Prices, bill};

const US: u64 = 1000;
const MS: u64 = 1000 * US;

/// What a tenant of the play does.
#[derive(Clone, Copy)]
struct Plan {
    weight: u32,
    /// So many threads of it ask.
    threads: usize,
    /// What a request costs, from and to; and one of so many costs this.
    cost: (u64, u64),
    long: (u64, u64),
    /// Between two requests of one that does not flood. Else it asks as soon as it may.
    pause: Option<u64>,
    /// When it begins.
    from: u64,
    /// Its requests are of that operation, and are charged at their price. Else each is charged what it costs.
    operation: Option<u32>,
    /// So much longer they seem to take than they cost: in parts of ten.
    slower: u64,
}

impl Plan {
    fn flood(weight: u32, threads: usize, cost: (u64, u64)) -> Self {
        Self {
            weight,
            threads,
            cost,
            long: (0, 0),
            pause: None,
            from: 0,
            operation: None,
            slower: 0,
        }
    }

    fn longest(&self) -> u64 {
        if self.long.0 > 0 { self.long.1.max(self.cost.1) } else { self.cost.1 }
    }
}

enum Event {
    Ask(usize),
    Done(usize, Account, u64),
}

/// What became of a tenant's requests.
#[derive(Clone, Default)]
struct Seen {
    /// When each began and what it cost.
    served: Vec<(u64, u64)>,
    /// How long each turn was waited for.
    waits: Vec<u64>,
    /// Since when its threads wait.
    asked: std::collections::VecDeque<u64>,
}

/// Threads, places and a clock that are none: each request takes as long as it costs.
struct Play {
    fair: Fair,
    prices: Prices,
    plans: Vec<Plan>,
    seen: Vec<Seen>,
    random: Random,
    now: u64,
    events: BinaryHeap<Reverse<(u64, u64)>>,
    what: std::collections::HashMap<u64, Event>,
    last: u64,
}

impl Play {
    fn new(places: usize, plans: Vec<Plan>, seed: u64) -> Self {
        let mut fair = Fair::new(places);
        for (number, plan) in plans.iter().enumerate() {
            assert_eq!(fair.join(plan.weight.into()), number);
        }
        let seen = vec![Seen::default(); plans.len()];
        let (random, events, what) = (Random::new(seed), BinaryHeap::new(), Default::default());
        let prices = Prices::new();
        let mut play = Self { fair, prices, plans, seen, random, now: 0, events, what, last: 0 };
        for tenant in 0..play.plans.len() {
            for _ in 0..play.plans[tenant].threads {
                let at = play.plans[tenant].from + play.random.below(100 * US);
                play.at(at, Event::Ask(tenant));
            }
        }
        play
    }

    fn at(&mut self, time: u64, event: Event) {
        self.last += 1;
        self.events.push(Reverse((time, self.last)));
        self.what.insert(self.last, event);
    }

    fn serve(&mut self, tenant: usize, account: Account) {
        let plan = self.plans[tenant];
        let cost = if plan.long.0 > 0 && self.random.below(plan.long.0) == 0 {
            plan.long.1
        } else {
            plan.cost.0 + self.random.below(plan.cost.1 - plan.cost.0 + 1)
        };
        self.seen[tenant].served.push((self.now, cost));
        let took = cost + cost * plan.slower / 10;
        self.at(self.now + took, Event::Done(tenant, account, took));
    }

    fn begin(&mut self, tenant: usize, account: Account) {
        let asked = self.seen[tenant].asked.pop_front().unwrap();
        self.seen[tenant].waits.push(self.now - asked);
        self.serve(tenant, account);
    }

    fn run(&mut self, until: u64) {
        while let Some(Reverse((time, number))) = self.events.peek().copied()
            && time <= until
        {
            self.events.pop();
            self.now = time;
            match self.what.remove(&number).unwrap() {
                Event::Ask(tenant) => {
                    self.seen[tenant].asked.push_back(time);
                    if let Some(account) = self.fair.ask(tenant, time) {
                        self.begin(tenant, account);
                    }
                }
                Event::Done(tenant, mut account, took) => {
                    let cost = match self.plans[tenant].operation.map(|n| Kind::new(n, 0)) {
                        None => took as f64,
                        Some(kind) => {
                            let price = self.prices.of(kind);
                            self.prices.learn(kind, took as f64);
                            bill(price, took as f64)
                        }
                    };
                    if self.fair.waiting > 0 {
                        self.fair.charge(tenant, &mut account, cost);
                    } else {
                        self.fair.charge_alone(tenant, &mut account, cost);
                    }
                    let pause = self.plans[tenant].pause;
                    if pause.is_none() && self.fair.goes_on(tenant, &account, 0.0, time) {
                        self.serve(tenant, account);
                    } else {
                        self.fair.leave(tenant, account);
                        // A thread that was woken is not there at once.
                        let away = pause.unwrap_or(0) + self.random.below(20 * US);
                        self.at(time + away, Event::Ask(tenant));
                    }
                }
            }
            while let Some((tenant, account)) = self.fair.next(self.now) {
                self.begin(tenant, account);
            }
            // No place is free while somebody waits.
            let Fair { waiting, running, places, .. } = self.fair;
            assert!(waiting == 0 || running >= places, "{waiting} wait, {running} of {places}");
            assert!(running < 3 * places + 1, "{running} at once, in {places} places");
        }
    }

    /// What a tenant's requests cost that began within that time.
    fn cost(&self, tenant: usize, from: u64, to: u64) -> f64 {
        let served = self.seen[tenant].served.iter();
        let within = served.filter(|(at, _)| (from..to).contains(at));
        within.map(|(_, cost)| *cost as f64).sum()
    }

    /// Its longest time without a request, from then on.
    fn gap(&self, tenant: usize, from: u64) -> u64 {
        let begun = self.seen[tenant].served.iter().map(|(at, _)| *at).filter(|at| *at >= from);
        let times: Vec<u64> = std::iter::once(from).chain(begun).chain([self.now]).collect();
        times.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(u64::MAX)
    }
}

/// Whatever their requests cost, long ones among them, and however many threads ask.
#[test]
fn shares_are_as_the_weights_in_any_window() {
    for seed in 0..24 {
        let mut random = Random::new(seed);
        let places = 1 + random.below(3) as usize;
        let plans: Vec<Plan> = (0..2 + random.below(5))
            .map(|_| {
                let weight = 1 + random.below(8) as u32;
                let least = (5 + random.below(150)) * US;
                let mut plan = Plan::flood(weight, places, (least, least * 2));
                if random.below(3) == 0 {
                    plan.long = (100, 3 * MS);
                }
                plan
            })
            .collect();
        let all: u32 = plans.iter().map(|plan| plan.weight).sum();
        let mut play = Play::new(places, plans.clone(), seed);
        play.run(4100 * MS);
        for window in [100..2100, 1100..3100, 2100..4100] {
            let (from, to) = (window.start * MS, window.end * MS);
            let costs: Vec<f64> = (0..plans.len()).map(|n| play.cost(n, from, to)).collect();
            let sum: f64 = costs.iter().sum();
            for (cost, plan) in costs.iter().zip(&plans) {
                let due = f64::from(plan.weight) / f64::from(all);
                let share = cost / sum / due;
                assert!((share - 1.0).abs() < 0.1, "seed {seed}: {share:.3} of {due:.3}");
            }
        }
    }
}

/// Who has to wait for a processor in the middle of its requests, or finds nothing in the caches, pays what others pay for the same; who asks for something dearer gets less of it.
#[test]
fn requests_of_a_kind_are_shared_by_number_and_dearer_ones_by_price() {
    for seed in 0..24 {
        let mut random = Random::new(seed);
        let places = 1 + random.below(2) as usize;
        let least = (10 + random.below(40)) * US;
        let flood = |weight, operation, times| Plan {
            operation: Some(operation),
            ..Plan::flood(weight, 2 * places, (times * least, times * least * 3 / 2))
        };
        let dearer = 2 + random.below(5);
        let mut plans =
            vec![flood(1, 15, 1), flood(2, 15, 1), flood(4, 15, 1), flood(1, 16, dearer)];
        plans[0].slower = 3 + random.below(12);
        let mut play = Play::new(places, plans.clone(), seed);
        play.run(4100 * MS);
        for window in [100..2100, 1100..3100, 2100..4100] {
            let begun = |tenant: usize| {
                let served = play.seen[tenant].served.iter();
                served.filter(|(at, _)| (window.start * MS..window.end * MS).contains(at)).count()
            };
            let each = |tenant: usize| begun(tenant) as f64 / f64::from(plans[tenant].weight);
            for other in 1..3 {
                let ratio = each(0) / each(other);
                assert!((ratio - 1.0).abs() < 0.1, "seed {seed}: {ratio:.3} of {other}");
            }
            // By what the first kind costs on the average of all that ask for it.
            let (one, two) = (play.prices.of(Kind::new(15, 0)), play.prices.of(Kind::new(16, 0)));
            let ratio = each(3) * two / (each(1) * one);
            assert!((ratio - 1.0).abs() < 0.15, "seed {seed}: {ratio:.3}, {dearer} times as dear");
            assert!(each(3) < 0.75 * each(1), "seed {seed}: {dearer} times as dear");
        }
    }
}

/// One that asks for less than its share waits for nobody as a rule, and never longer than for one request of the others.
#[test]
fn a_polite_one_is_served_at_once() {
    for seed in 0..24 {
        let mut random = Random::new(seed);
        let places = 1 + random.below(3) as usize;
        let floods = 2 + random.below(6);
        let mut plans: Vec<Plan> = (0..floods)
            .map(|_| {
                let least = (5 + random.below(300)) * US;
                let threads = 1 + random.below(4) as usize;
                Plan::flood(1 + random.below(4) as u32, threads, (least, least * 3))
            })
            .collect();
        let longest = plans.iter().map(Plan::longest).max().unwrap();
        let pause = Some((500 + random.below(2000)) * US);
        let polite = Plan { pause, ..Plan::flood(1, 1, (5 * US, 12 * US)) };
        plans.push(polite);
        let mut play = Play::new(places, plans, seed);
        play.run(2000 * MS);
        let waits = &play.seen.last().unwrap().waits[20..];
        assert!(waits.len() > 500, "{}", waits.len());
        let worst = waits.iter().max().unwrap();
        assert!(*worst <= longest, "seed {seed}: {worst} beside requests of {longest}");
        let late = waits.iter().filter(|wait| **wait > 0).count();
        assert!(late * 50 <= waits.len(), "seed {seed}: {late} of {} waited", waits.len());
    }
}

/// Beside those of a thousand times the weight, whose requests are long, one is served all the same.
#[test]
fn nobody_starves() {
    for seed in 0..8 {
        let heavy = Plan::flood(1000, 2, (4 * MS, 6 * MS));
        let light = Plan::flood(1, 1, (20 * US, 5 * MS));
        let mut play = Play::new(1 + seed as usize % 2, vec![heavy, heavy, heavy, light], seed);
        play.run(8000 * MS);
        let gap = play.gap(3, 0);
        // And what is under way when its time has come.
        assert!(gap <= PATIENCE + 30 * MS, "seed {seed}: {gap}");
        // What it was given beyond its share is owed by nobody, and not by it either.
        let had = play.fair.tenants[3].had;
        assert!(had <= play.fair.clock + 2.0 * (5 * MS) as f64, "{had} at {}", play.fair.clock);
    }
}

/// What a tenant did not use while it was away is not kept for later, whatever its weight.
#[test]
fn who_was_away_has_saved_little() {
    for seed in 0..24 {
        let mut random = Random::new(seed);
        let places = 1 + random.below(2) as usize;
        let weight = [1, 10, 1000][seed as usize % 3];
        let there = Plan::flood(1, places, (20 * US, 40 * US));
        let rival = Plan::flood(1 + random.below(3) as u32, places, (20 * US, 40 * US));
        let away = Plan { from: 3000 * MS, ..Plan::flood(weight, places, (20 * US, 40 * US)) };
        let mut play = Play::new(places, vec![there, rival, away], seed);
        play.run(4500 * MS);
        // As long as it takes anybody of that weight to have its share, and the credit.
        let all = f64::from(weight) + 1.0 + f64::from(rival.weight);
        let usual = 2.0 * (QUANTUM + (places as u64 * 80 * US) as f64) * all;
        let bound = usual + CREDIT * places as f64 + 500e3;
        let gap = play.gap(0, 2900 * MS);
        assert!(gap as f64 <= bound, "seed {seed}: {gap} of {bound}");
        // And it was let in at once.
        assert_eq!(play.seen[2].waits[0], 0, "seed {seed}: {:?}", play.fair);
    }
}

/// One that is alone owes nothing to those that come later, however long it was.
#[test]
fn who_was_alone_is_not_made_to_pay() {
    let alone = Plan::flood(1, 1, (20 * US, 40 * US));
    let later = Plan { from: 2000 * MS, ..alone };
    let mut play = Play::new(1, vec![alone, later], 7);
    play.run(2100 * MS);
    let gap = play.gap(0, 1900 * MS);
    assert!(gap <= 5 * MS, "{gap}");
    let (one, two) = (play.cost(0, 2010 * MS, 2100 * MS), play.cost(1, 2010 * MS, 2100 * MS));
    assert!((one / two - 1.0).abs() < 0.1, "{one} and {two}");
}

#[test]
fn what_was_charged_in_advance_and_not_used_is_given_back() {
    let mut fair = Fair::new(1);
    let tenant = fair.join(2.0);
    fair.tenants[tenant].usual = 90e3;
    let mut account = fair.ask(tenant, 0).unwrap();
    assert!((fair.tenants[tenant].had - 45e3).abs() < 1.0);
    fair.charge(tenant, &mut account, 10e3);
    assert!((fair.tenants[tenant].had - 5e3).abs() < 1.0);
    fair.leave(tenant, account);
    assert!((fair.tenants[tenant].had - 5e3).abs() < 1.0);
    let account = fair.ask(tenant, 0).unwrap();
    fair.leave(tenant, account);
    assert!((fair.tenants[tenant].had - 5e3).abs() < 1.0);
    assert!(fair.is_idle());
}
/// Threads of one tenant take turns as well: nobody else would make them.
#[test]
fn threads_of_one_tenant_take_turns() {
    for places in 1..3 {
        let plan = Plan::flood(3, 4, (20 * US, 40 * US));
        let mut play = Play::new(places, vec![plan, plan], 3);
        play.run(1000 * MS);
        for seen in &play.seen {
            let worst = seen.waits.iter().max().unwrap();
            assert!(*worst < 10 * MS, "{worst}");
        }
    }
}

/// Floods whose guests ask more slowly than they might are all behind their shares, and so they are polite; which of them asks for little is known
/// all the same, and that one is let in where as many have been as may be.
#[test]
fn one_that_asks_for_little_is_told_from_floods_with_slow_guests() {
    for seed in 0..24 {
        let places = 1 + seed as usize % 2;
        // Each of them uses half of its share of a place, or a little more.
        let slow = Plan { pause: Some(800 * US), ..Plan::flood(1, 3, (150 * US, 250 * US)) };
        let little = Plan { pause: Some(MS), ..Plan::flood(1, 1, (5 * US, 15 * US)) };
        let mut plans = vec![slow; 3 * places];
        plans.push(little);
        let last = plans.len() - 1;
        let mut play = Play::new(places, plans, seed);
        play.run(200 * MS);
        for _ in 0..500 {
            play.run(play.now + MS);
            let floods = (0..last).filter(|n| !play.fair.is_light(*n)).count();
            assert!(play.fair.is_light(last), "seed {seed}: {:?}", play.fair);
            assert!(floods == last, "seed {seed}: {floods} of {last}");
        }
        let waits = &play.seen[last].waits[20..];
        assert!(waits.len() > 400 && waits.iter().all(|wait| *wait == 0), "seed {seed}");
    }
}

/// A flood that has ended is light again soon; one alone at a place is not light, and has no rivals.
#[test]
fn who_has_stopped_is_light_again() {
    let mut fair = Fair::new(1);
    let (one, other) = (fair.join(1.0), fair.join(1.0));
    assert!(fair.is_light(one) && !fair.has_rivals(one));
    let mut now = 0;
    let mut use_it = |fair: &mut Fair, tenant: usize, used: u64| {
        let mut account = fair.ask(tenant, now).unwrap();
        now += used;
        fair.at(now);
        fair.charge(tenant, &mut account, used as f64);
        fair.leave(tenant, account);
    };
    (0..100).for_each(|_| use_it(&mut fair, one, 200 * US));
    assert!(!fair.is_light(one) && !fair.has_rivals(one));
    use_it(&mut fair, other, 100 * US);
    assert!(fair.is_light(other) && fair.has_rivals(one) && fair.has_rivals(other));
    fair.at(now + 200 * MS);
    let account = fair.ask(one, now + 200 * MS).unwrap();
    assert!(fair.is_light(one) && !fair.has_rivals(one));
    fair.leave(one, account);
}
