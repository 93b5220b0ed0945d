//! `quoin apply`, `quoin diff` and `quoin edit`: volumes as documents, and their snapshots and schedules.

use anyhow::{Context, Result, bail};
use clap::Args;
use quoin_api::control::Volume;
use serde::Serialize;
use std::io::Read;
use std::path::PathBuf;

use crate::client::{ClientOptions, Cluster, get_volume, refusal};
use crate::document::{self, Declared, Document};
use crate::output::{self, Format};
use crate::volume::{VolumeView, wait_until_changed};

/// Exit code of `quoin diff` where something would change.
const DIFFERS: i32 = 3;

pub const APPLY_EXAMPLE: &str = "A document says what a volume is to be; what it leaves out stays \
    as it is. A pool in\nspec.replicas that holds no replica gets one, a replicaId with another \
    pool moves there;\nwhere there are to be fewer, the list names those that stay.\n\nExamples:\n  \
    quoin volume get db --manifest > db.yaml\n  quoin diff -f db.yaml\n  \
    quoin apply -f db.yaml --wait\n\nOf kind Snapshot a document has spec: {volume: db}; of kind \
    Schedule\nspec: {volume: db, every: 1h, keep: 24, keepFor: 7d}. A schedule with other settings is \
    made anew;\nits snapshots stay.";

#[derive(Args)]
pub struct Files {
    /// A file of one or more documents, YAML or JSON; - is the standard input.
    #[arg(long = "file", short, value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
}

#[derive(Args)]
pub struct ApplyOptions {
    #[command(flatten)]
    files: Files,
    /// Only say what would change.
    #[arg(long)]
    dry_run: bool,
    /// Wait until the replicas are as declared, and say how far it is; --timeout is for how long
    /// nothing may move.
    #[arg(long)]
    wait: bool,
}

#[derive(Args)]
pub struct EditOptions {
    /// The volume's name or id.
    volume: String,
}

/// Result of one document.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct AppliedView {
    /// volume | snapshot | schedule
    kind: &'static str,
    name: String,
    /// Changes in words; empty where the volume is so already.
    changes: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    volume: Option<VolumeView>,
}

impl Files {
    /// All documents of all files: none is applied where one cannot be read.
    fn read(&self) -> Result<Vec<Declared>> {
        let mut documents = Vec::new();
        for path in &self.files {
            let name = path.display().to_string();
            let mut text = String::new();
            if name == "-" {
                std::io::stdin().read_to_string(&mut text).context("read the standard input")?;
            } else {
                text = std::fs::read_to_string(path).with_context(|| format!("read {name}"))?;
            }
            documents.extend(document::read(&text, &name)?);
        }
        Ok(documents)
    }
}

pub async fn apply(options: ApplyOptions, client: &ClientOptions, format: Format) -> Result<()> {
    let documents = options.files.read()?;
    let mut cluster = client.connect().await?;
    if options.dry_run {
        return find_out(&mut cluster, &documents, format).await.map(drop);
    }
    if documents.len() > 1 {
        // Dry run first: where one document is refused, the others are not applied either.
        all(&mut cluster, &documents, true, false, client).await?;
    }
    let applied = all(&mut cluster, &documents, false, options.wait, client).await?;
    print(format, &applied)
}

pub async fn diff(options: Files, client: &ClientOptions, format: Format) -> Result<()> {
    let documents = options.read()?;
    let mut cluster = client.connect().await?;
    if find_out(&mut cluster, &documents, format).await? {
        std::process::exit(DIFFERS);
    }
    Ok(())
}

/// Prints the changes of every document that would be applied, then the refusals of the others.
/// Returns whether something would change.
async fn find_out(cluster: &mut Cluster, documents: &[Declared], format: Format) -> Result<bool> {
    let (mut applied, mut refused) = (Vec::new(), Vec::new());
    for document in documents {
        match one(cluster, document, true).await {
            Ok((view, _)) => applied.push(view),
            Err(error) => refused.push(error),
        }
    }
    // Nothing to print where every document was refused.
    if !applied.is_empty() || refused.is_empty() {
        print(format, &applied)?;
    }
    let Some(last) = refused.pop() else {
        return Ok(applied.iter().any(|view| !view.changes.is_empty()));
    };
    for error in refused {
        eprintln!("error: {}", output::sentence(&error));
    }
    Err(last)
}

/// Applies one document, or with `dry_run` only asks for the changes; returns the result and the
/// volume.
async fn one(
    cluster: &mut Cluster,
    document: &Declared,
    dry_run: bool,
) -> Result<(AppliedView, Option<Volume>)> {
    let document = match document {
        Declared::Volume(document) => document,
        Declared::Snapshot(document) => {
            let (kind, name) = ("snapshot", document.metadata.name.clone());
            let changes = document.apply(cluster, dry_run).await;
            let changes = changes.with_context(|| format!("snapshot {name}"))?;
            return Ok((AppliedView { kind, name, changes, volume: None }, None));
        }
        Declared::Schedule(document) => {
            let (kind, name) = ("schedule", document.metadata.name.clone());
            let changes = document.apply(cluster, dry_run).await;
            let changes = changes.with_context(|| format!("schedule {name}"))?;
            return Ok((AppliedView { kind, name, changes, volume: None }, None));
        }
    };
    let name = document.metadata.name.clone();
    let answer = cluster.apply_volume(document.request(dry_run)?).await;
    let answer = answer.map_err(refusal).with_context(|| format!("volume {name}"))?.into_inner();
    let view = AppliedView { kind: "volume", name, changes: answer.changes, volume: None };
    Ok((view, answer.volume))
}

async fn all(
    cluster: &mut Cluster,
    documents: &[Declared],
    dry_run: bool,
    wait: bool,
    client: &ClientOptions,
) -> Result<Vec<AppliedView>> {
    let mut applied = Vec::new();
    for document in documents {
        let (view, mut volume) = one(cluster, document, dry_run).await?;
        if wait && let Some(found) = volume {
            volume = Some(wait_until_changed(cluster, found, client).await?);
        }
        let volume = volume.filter(|_| !dry_run).map(VolumeView::from);
        applied.push(AppliedView { volume, ..view });
    }
    Ok(applied)
}

fn print(format: Format, applied: &[AppliedView]) -> Result<()> {
    let text = |view: &AppliedView| match view.changes.as_slice() {
        [] => format!("{} {}: as declared", view.kind, view.name),
        changes => format!("{} {}: {}", view.kind, view.name, changes.join("; ")),
    };
    output::print_one(format, &applied, || applied.iter().map(text).collect::<Vec<_>>().join("\n"))
}

/// Opens a volume's document in the user's editor, and applies the result.
pub async fn edit(options: EditOptions, client: &ClientOptions, format: Format) -> Result<()> {
    let mut cluster = client.connect().await?;
    let mut before = Document::of(get_volume(&mut cluster, &options.volume).await?)?;
    // The status is no part of the request; it stands above as a comment.
    let status = before.status.take();
    let status = serde_yaml_ng::to_string(&status)?;
    let comment: String = status.lines().map(|line| format!("#   {line}\n")).collect();
    let text = format!(
        "# What is saved is applied; what is left out stays as it is.\n# status:\n{comment}{}",
        serde_yaml_ng::to_string(&before)?
    );
    let path = std::env::temp_dir().join(format!("quoin-edit-{}.yaml", std::process::id()));
    // `create_new`: a file of another user is not written through.
    let file = crate::private_file::create_new(&path);
    std::io::Write::write_all(
        &mut file.with_context(|| format!("make {}", path.display()))?,
        text.as_bytes(),
    )?;
    let editor = ["QUOIN_EDITOR", "VISUAL", "EDITOR"];
    let editor = editor.iter().find_map(|name| std::env::var(name).ok().filter(|e| !e.is_empty()));
    let editor = editor.unwrap_or_else(|| "vi".into());
    let status = std::process::Command::new("sh")
        .args(["-c", &format!("{editor} \"$1\""), "quoin-edit"])
        .arg(&path)
        .status()
        .with_context(|| format!("start the editor {editor:?} (VISUAL or EDITOR names another)"))?;
    if !status.success() {
        let _ = std::fs::remove_file(&path);
        bail!("the editor {editor:?} ended with {status}: nothing is changed");
    }
    let after =
        std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    if after == text {
        let _ = std::fs::remove_file(&path);
        return output::print_line(&format!("volume {}: nothing is changed", options.volume));
    }
    let kept = || format!("what was written is kept in {}", path.display());
    let documents = document::read(&after, "the document").with_context(kept)?;
    let is_of_it = |declared: &Declared| matches!(declared, Declared::Volume(one) if one.metadata.name == before.metadata.name);
    if documents.len() != 1 || !is_of_it(&documents[0]) {
        bail!("one document of volume {} is wanted; {}", before.metadata.name, kept());
    }
    let applied = all(&mut cluster, &documents, false, false, client).await.with_context(kept)?;
    let _ = std::fs::remove_file(&path);
    print(format, &applied)
}
