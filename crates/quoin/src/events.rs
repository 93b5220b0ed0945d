//! `quoin events`: past events, oldest first, and with `-w` new ones.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use quoin_api::control::{Event, WatchEventsRequest};
use serde::Serialize;
use tonic::Code;

use crate::client::{ClientOptions, refusal, volume_ref};
use crate::output::{self, Format};

#[derive(Args)]
pub struct EventOptions {
    /// Go on with new events as they come, until Ctrl-C.
    #[arg(long, short)]
    watch: bool,
    /// Only events of this volume and its replicas.
    #[arg(long)]
    volume: Option<String>,
}

/// An event; with `-o json -w`, one object a line, as a list would have no end.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct EventView {
    sequence: u64,
    time: String,
    severity: String,
    object: String,
    object_id: String,
    reason: String,
    message: String,
    count: u32,
}

impl From<Event> for EventView {
    fn from(event: Event) -> Self {
        let name = if event.object_name.is_empty() { &event.object_id } else { &event.object_name };
        Self {
            sequence: event.sequence,
            time: event.time.as_ref().map(show_time).unwrap_or_default(),
            severity: event.severity,
            object: match (name.is_empty(), event.object_kind.as_str()) {
                (true, kind) => kind.to_owned(),
                // A replica has its volume's name; the beginning of its id says which replica it
                // is.
                (false, "replica") if *name != event.object_id => {
                    let id: String = event.object_id.chars().take(ID_DIGITS).collect();
                    format!("replica/{name}/{id}")
                }
                (false, kind) => format!("{kind}/{name}"),
            },
            object_id: event.object_id.clone(),
            reason: event.reason,
            message: event.message,
            count: event.count.max(1),
        }
    }
}

/// Enough of a replica's id for a person, and for commands that take its beginning.
const ID_DIGITS: usize = 8;

/// Interval between two attempts to reach a controller that went away.
const RETRY: Duration = Duration::from_millis(500);

/// Prints events. With `-w` a controller that goes away is waited for: the watch is to outlive it.
pub async fn run(options: EventOptions, client: &ClientOptions, format: Format) -> Result<()> {
    let request = WatchEventsRequest {
        follow: options.watch,
        after_sequence: 0,
        volume: options.volume.as_deref().map(volume_ref),
    };
    let mut cluster = client.connect().await?;
    let mut events = cluster.watch_events(request.clone()).await.map_err(refusal)?.into_inner();
    let (mut printed, mut repeated) = (None, None);
    if !options.watch && matches!(format, Format::Json | Format::Yaml) {
        let mut all = Vec::new();
        while let Some(event) = events.message().await.map_err(refusal)? {
            all.push(EventView::from(event));
        }
        return output::print_one(format, &all, String::new);
    }
    loop {
        match events.message().await {
            Ok(Some(event)) => {
                let time = event.time.as_ref().map(|time| (time.seconds, time.nanos));
                if time > repeated {
                    printed = printed.max(time);
                    print(event, format)?;
                }
            }
            Ok(None) if !options.watch => return Ok(()),
            Err(status) if !options.watch || !is_passing(status.code()) => {
                return Err(refusal(status));
            }
            Ok(None) | Err(_) => {
                eprintln!(
                    "the connection to the controller ended; waiting for it (Ctrl-C ends \
                           this)"
                );
                events = loop {
                    tokio::time::sleep(RETRY).await;
                    let Ok(mut cluster) = client.connect().await else { continue };
                    match cluster.watch_events(request.clone()).await {
                        Ok(events) => break events.into_inner(),
                        Err(status) if is_passing(status.code()) => {}
                        Err(status) => return Err(refusal(status)),
                    }
                };
                // From the first again: a killed controller may give a number twice.
                repeated = printed;
                eprintln!("the controller is reachable again");
            }
        }
    }
}

/// Returns true if the code is of a connection that ended, or of a controller that is still
/// starting.
fn is_passing(code: Code) -> bool {
    matches!(code, Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled)
}

fn print(event: Event, format: Format) -> Result<()> {
    let view = EventView::from(event);
    output::print_line(&match format {
        Format::Json => serde_json::to_string(&view)?,
        Format::Yaml => format!("---\n{}", serde_yaml_ng::to_string(&view)?.trim_end()),
        Format::Table | Format::Wide => line(&view),
    })
}

/// Columns of fixed width: the next event is not known when one is printed.
fn line(event: &EventView) -> String {
    let times = if event.count > 1 { format!(" (x{})", event.count) } else { String::new() };
    output::plain(&format!(
        "{}  {:<7}  {:<24}  {:<22}  {}{times}",
        event.time, event.severity, event.object, event.reason, event.message
    ))
}

/// RFC 3339 in UTC with seconds.
pub fn show_time(time: &prost_types::Timestamp) -> String {
    // prost prints nanoseconds where there are any; seconds are what a person reads.
    let seconds = prost_types::Timestamp { seconds: time.seconds, nanos: 0 };
    seconds.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rfc_3339_in_utc_without_fractions() {
        let time = prost_types::Timestamp { seconds: 1_700_000_000, nanos: 123 };
        assert_eq!(show_time(&time), "2023-11-14T22:13:20Z");
    }

    #[test]
    fn an_event_of_a_replica_says_which_one() {
        let event = Event {
            object_kind: "replica".into(),
            object_id: "6aadf9d1634103de91ecffbb0b8cc741".into(),
            object_name: "db".into(),
            ..Event::default()
        };
        assert_eq!(EventView::from(event).object, "replica/db/6aadf9d1");
    }

    #[test]
    fn a_repeated_event_is_one_line_with_its_count() {
        let event = Event {
            severity: "Warning".into(),
            object_kind: "volume".into(),
            object_name: "db".into(),
            reason: "ReplicaDropped".into(),
            message: "pool b does not answer".into(),
            count: 3,
            ..Event::default()
        };
        let line = line(&EventView::from(event));
        assert!(line.contains("volume/db") && line.ends_with("answer (x3)"), "{line}");
    }
}
