//! Certificates and clocks: first and last moment of a certificate, and what to say where the clock
//! of a host is wrong.
//!
//! A clock is wrong in either direction. A certificate that was issued by a clock that was ahead is not
//! valid yet, for as long as the clock was ahead; it is replaced as one is that is about to expire.

use std::fmt::{self, Display};
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustls::CertificateError;
use rustls_pki_types::{CertificateDer, UnixTime};

/// Interval of the log's warnings about certificates that the clock makes invalid.
const AGAIN: Duration = Duration::from_secs(60);

/// First and last moment of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Validity {
    pub from: SystemTime,
    pub until: SystemTime,
}

impl Validity {
    /// Returns that of a certificate; `None` for bytes that are no certificate.
    pub fn of(certificate: &CertificateDer<'_>) -> Option<Self> {
        let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
        let moment = |t: i64| u64::try_from(t).ok().map(|s| UNIX_EPOCH + Duration::from_secs(s));
        let validity = parsed.validity();
        let from = moment(validity.not_before.timestamp())?;
        Some(Self { from, until: moment(validity.not_after.timestamp())? })
    }

    /// Returns whether the first moment lies ahead: a clock was wrong, or is.
    pub fn is_not_yet(&self, now: SystemTime) -> bool {
        now < self.from
    }

    pub fn has_run_out(&self, now: SystemTime) -> bool {
        self.until <= now
    }

    /// Returns the whole lifetime.
    pub fn life(&self) -> Duration {
        self.until.duration_since(self.from).unwrap_or_default()
    }

    /// Returns when to renew: at two thirds of the lifetime.
    pub fn renew_at(&self) -> SystemTime {
        self.from + self.life() * 2 / 3
    }

    /// Returns whether another certificate is to take its place: it is near its end, or not valid yet.
    pub fn is_due(&self, now: SystemTime) -> bool {
        self.is_not_yet(now) || self.renew_at() <= now
    }
}

/// A moment as people read it.
struct Moment(SystemTime);

impl Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
        match x509_parser::time::ASN1Time::from_timestamp(seconds) {
            Ok(time) => {
                let time = time.to_datetime();
                let (year, month, day) = (time.year(), u8::from(time.month()), time.day());
                let (hour, minute, second) = time.to_hms();
                write!(f, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
            }
            Err(_) => write!(f, "{seconds} s after 1970"),
        }
    }
}

fn moment(time: UnixTime) -> Moment {
    Moment(UNIX_EPOCH + Duration::from_secs(time.as_secs()))
}

/// Says that a certificate is not valid at this moment, with both times; `None`: time is not what is
/// wrong with it.
pub(crate) fn wrong_time(error: &rustls::Error) -> Option<String> {
    match error {
        rustls::Error::InvalidCertificate(CertificateError::NotValidYetContext {
            time,
            not_before,
        }) => Some(format!(
            "the other side's certificate is not valid before {}, and by this host's clock it is {}: \
             check this host's clock, and the other one's",
            moment(*not_before),
            moment(*time)
        )),
        rustls::Error::InvalidCertificate(CertificateError::ExpiredContext { time, not_after }) => {
            Some(format!(
                "the other side's certificate expired at {}, and by this host's clock it is {}: check \
             this host's clock, and the other one's",
                moment(*not_after),
                moment(*time)
            ))
        }
        // Both mean either end of the time.
        rustls::Error::AlertReceived(rustls::AlertDescription::CertificateExpired) => {
            let now = Moment(SystemTime::now());
            Some(format!(
                "by the other side's clock this one's certificate has expired or is not valid yet; by \
                 this host's clock it is {now}: check this host's clock, and the other one's"
            ))
        }
        _ => None,
    }
}

/// Says that a process's own certificate is not valid yet.
pub(crate) fn not_yet(validity: &Validity, now: SystemTime) -> String {
    format!(
        "it is not valid before {}, and by this clock it is {}: check this host's clock, and the \
         controller's",
        Moment(validity.from),
        Moment(now)
    )
}

/// Logs that a certificate was refused by the clock, at most once a minute.
pub(crate) fn warn_of_wrong_time(error: &rustls::Error) {
    static LAST: Mutex<Option<Instant>> = Mutex::new(None);
    let Some(text) = wrong_time(error) else { return };
    let mut last = LAST.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if last.is_none_or(|last| last.elapsed() >= AGAIN) {
        *last = Some(Instant::now());
        tracing::warn!("a certificate is refused: {text}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn a_certificate_is_due_near_its_end_and_before_its_beginning() {
        let validity = Validity { from: at(1000), until: at(1900) };
        let due = |seconds| validity.is_due(at(seconds));
        assert!(due(0) && due(999), "not valid yet");
        assert!(!due(1000) && !due(1599));
        assert!(due(1600) && due(1899) && due(5000));
        assert!(validity.is_not_yet(at(999)) && !validity.is_not_yet(at(1000)));
        assert!(validity.has_run_out(at(1900)) && !validity.has_run_out(at(1899)));
        assert!(!validity.has_run_out(at(0)), "a time that lies ahead is no end");
    }

    #[test]
    fn a_certificate_that_the_clock_refuses_is_told_with_both_times_and_the_way_out() {
        let time = |s| UnixTime::since_unix_epoch(Duration::from_secs(s));
        let early = CertificateError::NotValidYetContext {
            time: time(1_700_000_000),
            not_before: time(1_700_086_400),
        };
        let late = CertificateError::ExpiredContext {
            time: time(1_700_000_000),
            not_after: time(1_600_000_000),
        };
        for (error, other) in [(early, "2023-11-15T22:13:20Z"), (late, "2020-09-13T12:26:40Z")] {
            let text = wrong_time(&error.into()).unwrap();
            assert!(text.contains("2023-11-14T22:13:20Z") && text.contains(other), "{text}");
            assert!(text.contains("check this host's clock"), "{text}");
        }
        let alert = rustls::Error::AlertReceived(rustls::AlertDescription::CertificateExpired);
        assert!(wrong_time(&alert).unwrap().contains("check this host's clock"));
        assert_eq!(wrong_time(&CertificateError::UnknownIssuer.into()), None);
    }
}
