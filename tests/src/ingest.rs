//! Documents sent one by one, with what the server says about them.

use matkv_api::Client;
use matkv_api::v1::ingest_event::Event;
use matkv_api::v1::{DocumentDone, IngestEvent, IngestPart, IngestSummary};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::wait::DEADLINE;

/// An ingest under way.
pub struct Ingest {
    parts: mpsc::Sender<IngestPart>,
    events: Streaming<IngestEvent>,
}

/// A finished ingest.
#[derive(Clone, Debug, Default)]
pub struct Ingested {
    /// Outcomes in the order in which they came.
    pub documents: Vec<DocumentDone>,
    /// Totals.
    pub summary: IngestSummary,
}

impl Ingested {
    /// The outcome of one document.
    ///
    /// # Panics
    /// If there is none.
    pub fn of(&self, id: &str) -> &DocumentDone {
        let found = self.documents.iter().find(|d| d.document_id == id);
        found.unwrap_or_else(|| panic!("no outcome of {id}: {:?}", self.documents))
    }

    /// Reasons of the documents that were refused.
    pub fn errors(&self) -> Vec<&str> {
        self.documents.iter().map(|d| d.error.as_str()).filter(|e| !e.is_empty()).collect()
    }
}

impl Ingest {
    /// Opens an ingest.
    ///
    /// # Panics
    /// If the server refuses it.
    pub async fn start(client: &Client) -> Self {
        Self::try_start(client).await.expect("an ingest")
    }

    /// The same with a server that may be away.
    ///
    /// # Errors
    /// The server's refusal.
    ///
    /// # Panics
    /// If nothing is said in time.
    pub async fn try_start(client: &Client) -> Result<Self, Status> {
        let (parts, receiver) = mpsc::channel(64);
        let mut client = client.clone();
        let sent = tokio::time::timeout(DEADLINE, client.ingest(ReceiverStream::new(receiver)));
        let events = sent.await.expect("an ingest begins in time")?;
        Ok(Self { parts, events: events.into_inner() })
    }

    /// Sends a part.
    pub async fn part(&self, document_id: &str, text: &[u8], last: bool) {
        let (document_id, text) = (document_id.to_owned(), text.to_vec());
        // If the server has gone, the events say so.
        let _ = self.parts.send(IngestPart { document_id, text, last }).await;
    }

    /// Sends a whole document.
    pub async fn document(&self, id: &str, text: &str) {
        self.part(id, text.as_bytes(), true).await;
    }

    /// What the server says next; nothing at the end.
    ///
    /// # Errors
    /// The status that ended the ingest.
    ///
    /// # Panics
    /// If nothing comes in time.
    pub async fn next(&mut self) -> Result<Option<Event>, Status> {
        let event = tokio::time::timeout(DEADLINE, self.events.message()).await;
        Ok(event.expect("the ingest goes on")?.and_then(|e| e.event))
    }

    /// Waits for the outcome of the next document.
    ///
    /// # Panics
    /// If the ingest ends instead.
    pub async fn done(&mut self) -> DocumentDone {
        loop {
            match self.next().await.expect("the ingest goes on") {
                Some(Event::Document(done)) => return done,
                Some(Event::Progress(_)) => {}
                other => panic!("the ingest ended: {other:?}"),
            }
        }
    }

    /// Sends nothing more and reads to the end.
    ///
    /// # Panics
    /// If the ingest does not end with a summary.
    pub async fn finish(mut self) -> Ingested {
        self.parts = mpsc::channel(1).0;
        let mut documents = Vec::new();
        let mut summary = None;
        while let Some(event) = self.next().await.expect("the ingest ends well") {
            match event {
                Event::Document(done) => documents.push(done),
                Event::Summary(s) => summary = Some(s),
                Event::Progress(_) => {}
            }
        }
        Ingested { documents, summary: summary.expect("a summary") }
    }
}
