//! Client of the attach daemon, for `quoin node` and the CLI.

use std::path::PathBuf;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use zeroize::Zeroizing;

use super::Error;
use super::protocol::{
    AttachVolume, Attached, DetachedHere, LINE_BYTES_MAX, Request, Response, ServedElsewhere, Usage,
};

/// A client. Each call uses a connection of its own: the daemon may be restarted between any two.
#[derive(Clone, Debug)]
pub struct AttachClient {
    socket: PathBuf,
}

impl AttachClient {
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into() }
    }

    /// Attaches, or returns the existing attachment.
    pub async fn attach(&self, volume: AttachVolume) -> Result<Attached, Error> {
        match self.call(&Request::Attach(volume)).await? {
            Response::Ok(attached) => Ok(attached),
            other => Err(unexpected(other)),
        }
    }

    /// Detaches; succeeds if the volume was not attached.
    pub async fn detach(&self, volume: &str) -> Result<(), Error> {
        match self.call(&Request::Detach { volume: volume.to_owned() }).await? {
            Response::Detached {} => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    /// Grows the device after the target has grown.
    pub async fn resize(&self, volume: &str, size: u64) -> Result<Attached, Error> {
        match self.call(&Request::Resize { volume: volume.to_owned(), size }).await? {
            Response::Ok(attached) => Ok(attached),
            other => Err(unexpected(other)),
        }
    }

    pub async fn list(&self) -> Result<Vec<Attached>, Error> {
        match self.call(&Request::List {}).await? {
            Response::List(list) => Ok(list),
            other => Err(unexpected(other)),
        }
    }

    /// Returns one volume if it is attached. Work on another one does not delay the answer.
    pub async fn find(&self, volume: &str) -> Result<Option<Attached>, Error> {
        match self.call(&Request::Find { volume: volume.to_owned() }).await? {
            Response::List(list) => Ok(list.into_iter().next()),
            other => Err(unexpected(other)),
        }
    }

    /// Links an attached volume's device under the volume's name.
    pub async fn link(&self, volume: &str, name: &str) -> Result<Attached, Error> {
        let request = Request::Link { volume: volume.to_owned(), name: name.to_owned() };
        match self.call(&request).await? {
            Response::Ok(attached) => Ok(attached),
            other => Err(unexpected(other)),
        }
    }

    /// Ends a volume's device, even in use; returns the actions taken, as text.
    pub async fn end(&self, volume: &str) -> Result<Vec<String>, Error> {
        match self.call(&Request::End { volume: volume.to_owned() }).await? {
            Response::Ended { did } => Ok(did),
            other => Err(unexpected(other)),
        }
    }

    /// Fails all IO of a device that was made for an earlier use than another node's.
    pub async fn served_elsewhere(&self, served: ServedElsewhere) -> Result<(), Error> {
        match self.call(&Request::ServedElsewhere(served)).await? {
            Response::Ended { .. } => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    /// Removes a device whose volume is not attached to this host any more, or fails its IO.
    pub async fn detached(&self, detached: DetachedHere) -> Result<(), Error> {
        match self.call(&Request::Detached(detached)).await? {
            Response::Ended { .. } => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    /// Removes what was made for a volume and belongs to no attachment of it.
    pub async fn sweep(&self, volume: &str) -> Result<(), Error> {
        match self.call(&Request::Sweep { volume: volume.to_owned() }).await? {
            Response::Ended { .. } => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    pub async fn usage(&self) -> Result<Vec<Usage>, Error> {
        match self.call(&Request::Usage {}).await? {
            Response::Usage(usage) => Ok(usage),
            other => Err(unexpected(other)),
        }
    }

    async fn call(&self, request: &Request) -> Result<Response, Error> {
        let failed = |source| Error::Daemon { socket: self.socket.clone(), source };
        let line = serde_json::to_vec(request).map_err(|error| failed(error.into()))?;
        // A request to attach may have a key.
        let mut line = Zeroizing::new(line);
        line.push(b'\n');
        let mut stream = UnixStream::connect(&self.socket).await.map_err(failed)?;
        stream.write_all(&line).await.map_err(failed)?;
        let mut answer = String::new();
        // A list of many volumes is longer than any request.
        let limit = LINE_BYTES_MAX * 1024;
        BufReader::new(stream.take(limit)).read_line(&mut answer).await.map_err(failed)?;
        if answer.is_empty() {
            return Err(failed(std::io::ErrorKind::UnexpectedEof.into()));
        }
        match serde_json::from_str(&answer) {
            Ok(Response::Error { kind, message }) => Err(Error::Refused { kind, message }),
            Ok(response) => Ok(response),
            Err(_) => Err(Error::Answer(answer)),
        }
    }
}

fn unexpected(response: Response) -> Error {
    Error::Answer(format!("{response:?}"))
}
