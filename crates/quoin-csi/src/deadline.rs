//! The caller's own time for a call.
//!
//! A call that its caller has given up goes on, and a client library then makes a status of its own,
//! without a reason. So shortly before that the plugin answers by itself, with what the call waits
//! for: an orchestrator shows it to the user.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, timeout_at};
use tower::{Layer, Service};

use crate::Plugin;
use crate::plugin::Subject;
use crate::refusal;

/// Share of the caller's time that is left for the answer, and its bounds.
const MARGIN_SHARE: u32 = 10;
const MARGIN_MAX: Duration = Duration::from_secs(2);

tokio::task_local! {
    static ABOUT: Arc<Mutex<Option<Subject>>>;
}

/// Records what the call of this task works on.
pub(crate) fn is_about(subject: &Subject) {
    // Not every call has a caller: tests make some.
    let _ = ABOUT.try_with(|about| {
        *about.lock().unwrap_or_else(PoisonError::into_inner) = Some(subject.clone());
    });
}

/// Answers calls whose caller's time is nearly over.
#[derive(Clone)]
pub(crate) struct Deadlines {
    plugin: Plugin,
}

impl Deadlines {
    pub fn of(plugin: Plugin) -> Self {
        Self { plugin }
    }
}

/// The services below [`Deadlines`].
#[derive(Clone)]
pub(crate) struct Timed<S> {
    inner: S,
    plugin: Plugin,
}

impl<S> Layer<S> for Deadlines {
    type Service = Timed<S>;
    fn layer(&self, inner: S) -> Timed<S> {
        Timed { inner, plugin: self.plugin.clone() }
    }
}

type Answer<T> = Pin<Box<dyn Future<Output = Result<T, Infallible>> + Send>>;

impl<S, B, R> Service<http::Request<B>> for Timed<S>
where
    S: Service<http::Request<B>, Response = http::Response<R>, Error = Infallible>,
    S::Future: Send + 'static,
    R: Default + Send + 'static,
{
    type Response = http::Response<R>;
    type Error = Infallible;
    type Future = Answer<Self::Response>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let asked = Instant::now();
        let time =
            request.headers().get("grpc-timeout").and_then(|text| parse(text.to_str().ok()?));
        let rpc = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
        let answer = self.inner.call(request);
        let Some(time) = time else { return Box::pin(answer) };
        let plugin = self.plugin.clone();
        Box::pin(async move {
            let about = Arc::default();
            let mut answer = std::pin::pin!(ABOUT.scope(Arc::clone(&about), answer));
            let margin = (time / MARGIN_SHARE).min(MARGIN_MAX);
            let Some(end) = asked.checked_add(time) else { return answer.await };
            if let Ok(answer) = timeout_at(end - margin, &mut answer).await {
                return answer;
            }
            let subject = about.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let Some(subject) = subject else { return answer.await };
            let reason = timeout_at(end - margin / 2, plugin.reason(&subject));
            let reason = tokio::select! {
                answer = &mut answer => return answer,
                reason = reason => reason.ok().flatten(),
            };
            if let Ok(answer) = timeout_at(end - margin / 4, &mut answer).await {
                return answer;
            }
            let text = subject.to_string();
            Ok(refusal::not_in_time(&rpc, &text, time, reason.as_deref()).into_http())
        })
    }
}

/// Parses the header's value: at most eight digits and a unit.
fn parse(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let is_number = (1..=8).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
    let number: u64 = digits.parse().ok().filter(|_| is_number)?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_callers_time_is_read_with_each_unit_and_anything_else_is_none() {
        for (text, seconds) in [("2H", 7200.0), ("3M", 180.0), ("4S", 4.0), ("5m", 0.005)] {
            assert_eq!(parse(text).unwrap().as_secs_f64(), seconds, "{text}");
        }
        assert_eq!(parse("99999999n").unwrap().as_nanos(), 99_999_999);
        assert_eq!(parse("7u").unwrap(), Duration::from_micros(7));
        for bad in ["", "S", "1", "1s", "+1S", "-1S", "123456789S", "1.5S", "1é", "é"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
