"""What can go wrong in a hand-over, by who must act. All are `ServiceError`s, so they cross the wire as they are.

caller    LayoutMismatch, InvalidReservation, DuplicateAttempt, UnknownTicket, RecordMismatch
capacity  DecodePoolFull
peer      SenderNotAttached, SenderGone, StalePeer, AttemptEnded, TicketEnded, LeaseExpired, TransferFailed,
          CorruptBlocks
ours      IncompleteTransfer
"""

from __future__ import annotations

from protos import errors


class LayoutMismatch(errors.FailedPrecondition):
    """The two caches cannot exchange blocks; the message names the first difference."""

    reason = "LAYOUT_MISMATCH"


class InvalidReservation(errors.InvalidArgument):
    """Asks for something that no state of this worker could grant."""

    reason = "INVALID_RESERVATION"


class DuplicateAttempt(errors.AlreadyExists):
    """This attempt has, or had, a ticket."""

    reason = "DUPLICATE_ATTEMPT"


class UnknownTicket(errors.NotFound):
    """No ticket of this name is held here; it may have been committed or released."""

    reason = "UNKNOWN_TICKET"


class RecordMismatch(errors.FailedPrecondition):
    """A record that does not belong to the ticket it names."""

    reason = "RECORD_MISMATCH"


class DecodePoolFull(errors.ResourceExhausted):
    """Not enough free blocks now. The sender keeps the sequence queued and asks again."""

    reason = "DECODE_POOL_FULL"
    retryable = True


class SenderNotAttached(errors.Unavailable):
    """A sender must attach before it reserves: without its stream nobody would learn that it died."""

    reason = "SENDER_NOT_ATTACHED"
    retryable = True


class SenderGone(errors.Unavailable):
    """The sender's Attach stream ended before its sequence was committed."""

    reason = "SENDER_GONE"
    retryable = True


class StalePeer(errors.Unavailable):
    """Another process start answers at this address than the one that was placed."""

    reason = "STALE_PEER"
    retryable = True


class AttemptEnded(errors.Aborted):
    """This attempt was aborted here: nothing more will be taken for it."""

    reason = "ATTEMPT_ENDED"
    retryable = True


class TicketEnded(errors.Aborted):
    """The right to write has ended before the sequence was committed."""

    reason = "TICKET_ENDED"
    retryable = True


class LeaseExpired(TicketEnded):
    """The sender did not renew its lease in time."""

    reason = "LEASE_EXPIRED"


class TransferFailed(errors.Unavailable):
    """The blocks could not be written, or it is not certain that they were."""

    reason = "TRANSFER_FAILED"
    retryable = True


class CorruptBlocks(errors.Aborted):
    """What lies in the blocks is not what was sent, or it could not be told: nothing is decoded from them."""

    reason = "CORRUPT_BLOCKS"
    retryable = True


class IncompleteTransfer(errors.Internal):
    """A commit was asked for while blocks of the ticket had never been written."""

    reason = "INCOMPLETE_TRANSFER"
