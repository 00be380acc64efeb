"""Generated from protos/etcd/v3/etcd.proto by scripts/gen_proto.py; do not edit."""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FILE = (
    b'\n\x12etcd/v3/etcd.proto\x12\x0cet'
    b'cdserverpb"\xae\x01\n\x08KeyValue\x12'
    b"\x10\n\x03key\x18\x01 \x01(\x0cR\x03key\x12'\n\x0fcre"
    b'ate_revision\x18\x02 \x01(\x03R\x0ecrea'
    b'teRevision\x12!\n\x0cmod_revisi'
    b'on\x18\x03 \x01(\x03R\x0bmodRevision\x12\x18\n'
    b'\x07version\x18\x04 \x01(\x03R\x07version\x12'
    b'\x14\n\x05value\x18\x05 \x01(\x0cR\x05value\x12\x14\n'
    b'\x05lease\x18\x06 \x01(\x03R\x05lease"\x85\x01\n\x0e'
    b'ResponseHeader\x12\x1d\n\ncluste'
    b'r_id\x18\x01 \x01(\x04R\tclusterId\x12\x1b\n'
    b'\tmember_id\x18\x02 \x01(\x04R\x08member'
    b'Id\x12\x1a\n\x08revision\x18\x03 \x01(\x03R\x08re'
    b'vision\x12\x1b\n\traft_term\x18\x04 \x01('
    b'\x04R\x08raftTerm"o\n\x0cRangeRequ'
    b'est\x12\x10\n\x03key\x18\x01 \x01(\x0cR\x03key\x12\x1b\n'
    b'\trange_end\x18\x02 \x01(\x0cR\x08rangeE'
    b'nd\x12\x14\n\x05limit\x18\x03 \x01(\x03R\x05limit'
    b'\x12\x1a\n\x08revision\x18\x04 \x01(\x03R\x08revi'
    b'sion"\x99\x01\n\rRangeResponse\x124'
    b'\n\x06header\x18\x01 \x01(\x0b2\x1c.etcdser'
    b'verpb.ResponseHeaderR\x06he'
    b'ader\x12(\n\x03kvs\x18\x02 \x03(\x0b2\x16.etcd'
    b'serverpb.KeyValueR\x03kvs\x12\x12'
    b'\n\x04more\x18\x03 \x01(\x08R\x04more\x12\x14\n\x05co'
    b'unt\x18\x04 \x01(\x03R\x05count"J\n\nPutR'
    b'equest\x12\x10\n\x03key\x18\x01 \x01(\x0cR\x03key'
    b'\x12\x14\n\x05value\x18\x02 \x01(\x0cR\x05value\x12\x14'
    b'\n\x05lease\x18\x03 \x01(\x03R\x05lease"C\n\x0b'
    b'PutResponse\x124\n\x06header\x18\x01 '
    b'\x01(\x0b2\x1c.etcdserverpb.Respo'
    b'nseHeaderR\x06header"C\n\x12Del'
    b'eteRangeRequest\x12\x10\n\x03key\x18\x01'
    b' \x01(\x0cR\x03key\x12\x1b\n\trange_end\x18\x02'
    b' \x01(\x0cR\x08rangeEnd"e\n\x13Delete'
    b'RangeResponse\x124\n\x06header\x18'
    b'\x01 \x01(\x0b2\x1c.etcdserverpb.Res'
    b'ponseHeaderR\x06header\x12\x18\n\x07d'
    b'eleted\x18\x02 \x01(\x03R\x07deleted"\xec\x01'
    b'\n\tRequestOp\x12A\n\rrequest_r'
    b'ange\x18\x01 \x01(\x0b2\x1a.etcdserverp'
    b'b.RangeRequestH\x00R\x0creques'
    b'tRange\x12;\n\x0brequest_put\x18\x02 '
    b'\x01(\x0b2\x18.etcdserverpb.PutRe'
    b'questH\x00R\nrequestPut\x12T\n\x14r'
    b'equest_delete_range\x18\x03 \x01('
    b'\x0b2 .etcdserverpb.DeleteR'
    b'angeRequestH\x00R\x12requestDe'
    b'leteRangeB\t\n\x07request"\xf7\x01\n'
    b'\nResponseOp\x12D\n\x0eresponse_'
    b'range\x18\x01 \x01(\x0b2\x1b.etcdserver'
    b'pb.RangeResponseH\x00R\rresp'
    b'onseRange\x12>\n\x0cresponse_pu'
    b't\x18\x02 \x01(\x0b2\x19.etcdserverpb.P'
    b'utResponseH\x00R\x0bresponsePu'
    b't\x12W\n\x15response_delete_ran'
    b'ge\x18\x03 \x01(\x0b2!.etcdserverpb.'
    b'DeleteRangeResponseH\x00R\x13r'
    b'esponseDeleteRangeB\n\n\x08re'
    b'sponse"\xf7\x01\n\x07Compare\x12\x16\n\x06re'
    b'sult\x18\x01 \x01(\x05R\x06result\x12\x16\n\x06ta'
    b'rget\x18\x02 \x01(\x05R\x06target\x12\x10\n\x03ke'
    b'y\x18\x03 \x01(\x0cR\x03key\x12\x1a\n\x07version\x18'
    b'\x04 \x01(\x03H\x00R\x07version\x12)\n\x0fcrea'
    b'te_revision\x18\x05 \x01(\x03H\x00R\x0ecre'
    b'ateRevision\x12#\n\x0cmod_revis'
    b'ion\x18\x06 \x01(\x03H\x00R\x0bmodRevision'
    b'\x12\x16\n\x05value\x18\x07 \x01(\x0cH\x00R\x05value'
    b'\x12\x16\n\x05lease\x18\x08 \x01(\x03H\x00R\x05lease'
    b'B\x0e\n\x0ctarget_union"\xa3\x01\n\nTxn'
    b'Request\x12/\n\x07compare\x18\x01 \x03(\x0b'
    b'2\x15.etcdserverpb.CompareR'
    b'\x07compare\x121\n\x07success\x18\x02 \x03('
    b'\x0b2\x17.etcdserverpb.Request'
    b'OpR\x07success\x121\n\x07failure\x18\x03'
    b' \x03(\x0b2\x17.etcdserverpb.Requ'
    b'estOpR\x07failure"\x99\x01\n\x0bTxnRe'
    b'sponse\x124\n\x06header\x18\x01 \x01(\x0b2\x1c'
    b'.etcdserverpb.ResponseHe'
    b'aderR\x06header\x12\x1c\n\tsucceede'
    b'd\x18\x02 \x01(\x08R\tsucceeded\x126\n\tre'
    b'sponses\x18\x03 \x03(\x0b2\x18.etcdserv'
    b'erpb.ResponseOpR\trespons'
    b'es"5\n\x11LeaseGrantRequest\x12'
    b'\x10\n\x03TTL\x18\x01 \x01(\x03R\x03TTL\x12\x0e\n\x02ID\x18'
    b'\x02 \x01(\x03R\x02ID"\x82\x01\n\x12LeaseGrant'
    b'Response\x124\n\x06header\x18\x01 \x01(\x0b'
    b'2\x1c.etcdserverpb.Response'
    b'HeaderR\x06header\x12\x0e\n\x02ID\x18\x02 \x01'
    b'(\x03R\x02ID\x12\x10\n\x03TTL\x18\x03 \x01(\x03R\x03TTL'
    b'\x12\x14\n\x05error\x18\x04 \x01(\tR\x05error"$'
    b'\n\x12LeaseRevokeRequest\x12\x0e\n\x02'
    b'ID\x18\x01 \x01(\x03R\x02ID"K\n\x13LeaseRev'
    b'okeResponse\x124\n\x06header\x18\x01 '
    b'\x01(\x0b2\x1c.etcdserverpb.Respo'
    b'nseHeaderR\x06header"\'\n\x15Lea'
    b'seKeepAliveRequest\x12\x0e\n\x02ID'
    b'\x18\x01 \x01(\x03R\x02ID"p\n\x16LeaseKeepA'
    b'liveResponse\x124\n\x06header\x18\x01'
    b' \x01(\x0b2\x1c.etcdserverpb.Resp'
    b'onseHeaderR\x06header\x12\x0e\n\x02ID'
    b'\x18\x02 \x01(\x03R\x02ID\x12\x10\n\x03TTL\x18\x03 \x01(\x03R'
    b'\x03TTL"\xb5\x01\n\x0cWatchRequest\x12I\n'
    b'\x0ecreate_request\x18\x01 \x01(\x0b2 .'
    b'etcdserverpb.WatchCreate'
    b'RequestH\x00R\rcreateRequest'
    b'\x12I\n\x0ecancel_request\x18\x02 \x01(\x0b'
    b'2 .etcdserverpb.WatchCan'
    b'celRequestH\x00R\rcancelRequ'
    b'estB\x0f\n\rrequest_union"\x93\x01\n'
    b'\x12WatchCreateRequest\x12\x10\n\x03k'
    b'ey\x18\x01 \x01(\x0cR\x03key\x12\x1b\n\trange_e'
    b'nd\x18\x02 \x01(\x0cR\x08rangeEnd\x12%\n\x0est'
    b'art_revision\x18\x03 \x01(\x03R\rstar'
    b"tRevision\x12'\n\x0fprogress_no"
    b'tify\x18\x04 \x01(\x08R\x0eprogressNoti'
    b'fy"/\n\x12WatchCancelRequest'
    b'\x12\x19\n\x08watch_id\x18\x01 \x01(\x03R\x07watc'
    b'hId"\x93\x02\n\rWatchResponse\x124\n'
    b'\x06header\x18\x01 \x01(\x0b2\x1c.etcdserv'
    b'erpb.ResponseHeaderR\x06hea'
    b'der\x12\x19\n\x08watch_id\x18\x02 \x01(\x03R\x07w'
    b'atchId\x12\x18\n\x07created\x18\x03 \x01(\x08R'
    b'\x07created\x12\x1a\n\x08canceled\x18\x04 \x01'
    b'(\x08R\x08canceled\x12)\n\x10compact_'
    b'revision\x18\x05 \x01(\x03R\x0fcompactR'
    b'evision\x12#\n\rcancel_reason'
    b'\x18\x06 \x01(\tR\x0ccancelReason\x12+\n\x06'
    b'events\x18\x0b \x03(\x0b2\x13.etcdserve'
    b'rpb.EventR\x06events"C\n\x05Eve'
    b'nt\x12\x12\n\x04type\x18\x01 \x01(\x05R\x04type\x12&'
    b'\n\x02kv\x18\x02 \x01(\x0b2\x16.etcdserverp'
    b'b.KeyValueR\x02kvb\x06proto3'
)

# A pool of our own: another library's messages of the same name cannot clash with these.
_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(descriptor_pb2.FileDescriptorProto.FromString(_FILE))


def _message(name):
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName("etcdserverpb." + name))


KeyValue = _message("KeyValue")
ResponseHeader = _message("ResponseHeader")
RangeRequest = _message("RangeRequest")
RangeResponse = _message("RangeResponse")
PutRequest = _message("PutRequest")
PutResponse = _message("PutResponse")
DeleteRangeRequest = _message("DeleteRangeRequest")
DeleteRangeResponse = _message("DeleteRangeResponse")
RequestOp = _message("RequestOp")
ResponseOp = _message("ResponseOp")
Compare = _message("Compare")
TxnRequest = _message("TxnRequest")
TxnResponse = _message("TxnResponse")
LeaseGrantRequest = _message("LeaseGrantRequest")
LeaseGrantResponse = _message("LeaseGrantResponse")
LeaseRevokeRequest = _message("LeaseRevokeRequest")
LeaseRevokeResponse = _message("LeaseRevokeResponse")
LeaseKeepAliveRequest = _message("LeaseKeepAliveRequest")
LeaseKeepAliveResponse = _message("LeaseKeepAliveResponse")
WatchRequest = _message("WatchRequest")
WatchCreateRequest = _message("WatchCreateRequest")
WatchCancelRequest = _message("WatchCancelRequest")
WatchResponse = _message("WatchResponse")
Event = _message("Event")
