use std::sync::Mutex;

use super::*;

const MOMENT: Duration = Duration::from_millis(10);

/// Fails at some keys, and takes its time at others.
struct Slow {
    queue: Queue<u32>,
    done: Mutex<Vec<u32>>,
    takes: Duration,
}

impl Slow {
    fn new(takes: Duration) -> Arc<Self> {
        Arc::new(Self { queue: Queue::new(10), done: Mutex::default(), takes })
    }

    fn count(&self, key: u32) -> usize {
        self.done.lock().unwrap().iter().filter(|done| **done == key).count()
    }
}

#[async_trait::async_trait]
impl Reconciler for Slow {
    type Key = u32;
    const NAME: &'static str = "slow";

    fn queue(&self) -> &Queue<u32> {
        &self.queue
    }

    async fn reconcile(&self, key: &u32, _: Instant) -> Result<Next, Error> {
        self.done.lock().unwrap().push(*key);
        tokio::time::sleep(self.takes).await;
        match key {
            13 => Err(Error::Busy("it never works".to_owned())),
            7 => Ok(Next::After(MOMENT)),
            _ => Ok(Next::Rest),
        }
    }
}

async fn eventually(what: &str, holds: impl Fn() -> bool) {
    for _ in 0..6000 {
        if holds() {
            return;
        }
        tokio::time::sleep(MOMENT).await;
    }
    panic!("never: {what}");
}

#[tokio::test]
async fn a_slow_reconciler_delays_no_other() {
    let (slow, quick) = (Slow::new(Duration::from_secs(3600)), Slow::new(Duration::ZERO));
    let tasks = [tokio::spawn(work(slow.clone())), tokio::spawn(work(quick.clone()))];
    for reconciler in [&slow, &quick] {
        reconciler.queue.add(1, Duration::ZERO);
        reconciler.queue.add(2, MOMENT);
    }
    eventually("the quick one is done", || quick.count(2) == 1).await;
    eventually("the slow one began", || slow.count(1) == 1).await;
    assert_eq!((slow.count(2), quick.count(1)), (0, 1));
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn a_key_comes_again_when_it_asked_to_and_after_failures_and_one_at_rest_when_it_is_added() {
    let reconciler = Slow::new(Duration::ZERO);
    let task = tokio::spawn(work(reconciler.clone()));
    for key in [1, 7, 13] {
        reconciler.queue.add(key, Duration::ZERO);
    }
    eventually("it asks again and again", || reconciler.count(7) > 3).await;
    eventually("it fails again", || reconciler.count(13) > 1).await;
    assert_eq!(reconciler.count(1), 1);
    reconciler.queue.add(1, Duration::ZERO);
    eventually("it is added", || reconciler.count(1) == 2).await;
    task.abort();
}
